"""Which of the workers that may take a request fit what is asked of them besides."""

from collections.abc import Container

import numpy as np

from services.router.placement import Able, Question
from services.router.pricing import Priced
from shared.contracts.events import Exclusion
from shared.contracts.ids import WorkerId
from shared.model.cost import Ints


def fitting(
    able: Able, priced: Priced, question: Question, busy: Container[WorkerId], excluded: dict[WorkerId, Exclusion]
) -> Able | None:
    """Those that are not `busy`, if the question is for such, and that are predicted to be in time, if it names one; None
    without any. The others go to `excluded`."""
    roster, prices = priced.pricing.roster, priced.prices
    way_W = prices.price_us_KW.argmin(axis=0)
    rows_W = np.arange(len(roster.workers)) if able.rows_W is None else able.rows_W
    needs_us_W = (_of_ways(priced.waits.queue_us_KW, way_W) + _of_ways(prices.service_us_KW, way_W))[rows_W]
    # By what it has, not by what is ahead: a longer prompt that waits there would be overtaken.
    busy_W = np.zeros(len(rows_W), dtype=np.bool_)
    if question.idle_only:
        busy_W[:] = [roster.workers[row] in busy for row in rows_W.tolist()]
    late_W = ~busy_W & (needs_us_W > (np.inf if question.within_us is None else question.within_us))
    excluded.update((roster.workers[row], "share") for row in rows_W[busy_W].tolist())
    excluded.update((roster.workers[row], "slo") for row in rows_W[late_W].tolist())
    fit_W = rows_W[~(busy_W | late_W)]
    return Able(roster.only(fit_W), fit_W) if len(fit_W) else None


def _of_ways(column_KW: Ints, way_W: Ints) -> Ints:
    """Of each worker in its way. A column that is the same for all ways is there once."""
    column_W: Ints = column_KW[0] if len(column_KW) == 1 else np.take_along_axis(column_KW, way_W[None], axis=0)[0]
    return column_W
