"""Which of the workers that may take a request fit what is asked of them besides."""

from collections.abc import Container

import numpy as np

from services.router.loops import QUEUE_US, SERVICE_US
from services.router.placement import Able, Question
from services.router.pricing import Priced
from shared.contracts.events import Exclusion
from shared.contracts.ids import WorkerId


def fitting(
    able: Able, priced: Priced, question: Question, busy: Container[WorkerId], excluded: dict[WorkerId, Exclusion]
) -> Able | None:
    """Those that are not `busy`, if the question is for such, and that are predicted to be in time, if it names one; None
    without any. The others go to `excluded`."""
    roster, rows_W = priced.roster, able.rows_W
    needs_us_W = (priced.cost_CW[QUEUE_US] + priced.cost_CW[SERVICE_US])[rows_W]
    # By what it has, not by what is ahead: a longer prompt that waits there would be overtaken.
    busy_W = np.zeros(len(rows_W), dtype=np.bool_)
    if question.idle_only:
        busy_W[:] = [roster.workers[row] in busy for row in rows_W.tolist()]
    late_W = ~busy_W & (needs_us_W > (np.inf if question.within_us is None else question.within_us))
    excluded.update((roster.workers[row], "share") for row in rows_W[busy_W].tolist())
    excluded.update((roster.workers[row], "slo") for row in rows_W[late_W].tolist())
    fit_W = rows_W[~(busy_W | late_W)]
    return Able(roster.only(fit_W), fit_W) if len(fit_W) else None
