"""Coefficients fitted anew, out of what prefills took that had their step to themselves.

A worker's measured over predicted time (`shared/model/calibration.py`) prices that worker right, and says nothing of shapes or
degrees that it does not run. A set that is wrong in those is replaced here, and only on evidence:

    evidence    the newest prefills of each (degree, size of R, size of P); one counts if its prediction is what the set of its
                node says of steps with nothing else in them, for a prompt in chunks of those that its node cuts
    enough      `SAMPLES_MIN` of them, at two degrees at least: one degree alone cannot tell what is divided by it
    better      the error on shapes that the fit has not seen is below `ERROR_SHARE_MAX` of the error of the set that prices now
    bounded     no prompt of `ASKED` becomes more than `CHANGE_MAX` times as dear or as cheap, at any degree of the evidence

Every new set begins with no evidence. Agents keep the set that they were started with.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from pydantic import ValidationError

from shared.contracts.envelope import Stored
from shared.contracts.events import CalibrationUpdated, NodeRegistered, PrefillCompleted, RouterRegistered
from shared.contracts.ids import node_of
from shared.model import cost as cost_model
from shared.model.calibration import RATIO_MAX
from shared.model.cost import US_PER_S, Coefficients, is_refit, refit_of
from shared.model.fitting import Sample, fit, relative_errors
from shared.model.pool import Pool

SAMPLES_MIN = 64
"""Eleven for each coefficient."""

DEGREE_SAMPLES_MIN = 8
SAMPLES_PER_CELL = 4
"""So that what a pool is asked for most does not outweigh all else."""

CELLS_MAX = 256
"""With that, a fit takes less than a tenth of a second."""

ERROR_MIN = 0.05
"""A set that errs by less is as good as measured times are."""

ERROR_SHARE_MAX = 0.8
CHANGE_MAX = 4.0
ASKED = ((256, 0), (4_096, 0), (4_096, 28_672), (65_536, 0))
"""(R, P) from short to long, cold and behind a cached prefix."""


@dataclass(slots=True)
class Evidence:
    """State of the fold; `evolve` is its only writer. `given` is the set that routers were started with, `current` the one that
    prices are made of; both are None before the first router. A cell is (degree, bits of R, bits of P)."""

    given: Coefficients | None = None
    current: Coefficients | None = None
    cells: dict[tuple[int, int, int], deque[Sample]] = field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        """All of them, whatever order they came in."""
        return sorted(each for cell in self.cells.values() for each in cell)


def evolve(evidence: Evidence, stored: Stored, pool: Pool) -> None:
    """Fold one event. `pool` is as of it."""
    match stored.data:
        case PrefillCompleted() as data:
            _note(evidence, data, pool)
        case RouterRegistered() as data:
            _begin(evidence, data)
        case CalibrationUpdated() as data:
            # Of a log that has dropped its beginning it comes before any router that still lives.
            current = evidence.current
            evidence.current = cost_model.evolve(current, stored) if current is not None else cost_model.read(data)
            evidence.cells.clear()
        case _:
            pass


def decide(evidence: Evidence, seen_seq: int) -> list[CalibrationUpdated]:
    """`calibration-updated`, if the evidence up to `seen_seq` calls for it."""
    samples, current = evidence.samples, evidence.current
    if current is None or evidence.given is None or not _enough(samples):
        return []
    before = float(np.abs(relative_errors(samples, current)).mean())
    if before < ERROR_MIN:
        return []
    try:
        found = fit(samples, "with g", refit_of(current.version, seen_seq))
    except ValidationError:
        return []  # a coefficient beyond what any set may have
    after = found.held_out
    if after is None or after.mape > ERROR_SHARE_MAX * before or not _bounded(current, found.coefficients, samples):
        return []
    return [
        CalibrationUpdated(
            coefficients=found.coefficients.model_dump(),
            samples=len(samples),
            error_before=before,
            error_after=after.mape,
            to_seq=seen_seq,
        )
    ]


def _begin(evidence: Evidence, data: RouterRegistered) -> None:
    """A router prices by the set that it was started with, or by what was fitted while that set priced."""
    try:
        given = Coefficients.model_validate(data.coefficients)
    except ValidationError:
        return
    if evidence.current is None or not is_refit(evidence.current.version, given.version):
        evidence.current = given
    evidence.given = given


def _note(evidence: Evidence, data: PrefillCompleted, pool: Pool) -> None:
    worker, given = pool.workers.get(data.worker), evidence.given
    if worker is None or given is None or not data.predicted_us:
        return
    spec = pool.nodes[node_of(data.worker)].spec
    if spec is None or spec.coefficients_version != given.version:
        return
    R, P = data.computed_tokens, data.cached_own_tokens + data.cached_in_flight_tokens + data.cached_fetched_tokens
    whole_us = given.prefill_us(worker.degree, R, P)
    chunks = _chunks(R, P, spec, data.steps)
    alone_us = sum(given.prefill_us(worker.degree, *chunk) for chunk in chunks)
    if (
        abs(data.predicted_us - alone_us) >= data.steps
        or not alone_us < data.prefill_us * RATIO_MAX < alone_us * RATIO_MAX**2
    ):
        return
    key = (worker.degree, R.bit_length(), P.bit_length())
    if key in evidence.cells or len(evidence.cells) < CELLS_MAX:
        cell = evidence.cells.setdefault(key, deque(maxlen=SAMPLES_PER_CELL))
        # In one step it would have taken this.
        cell.append(Sample(worker.degree, R, P, data.prefill_us / alone_us * whole_us / US_PER_S))


def _chunks(R: int, P: int, spec: NodeRegistered, steps: int) -> list[tuple[int, int]]:
    """(R, P) of each of so many steps, if the worker served nothing else meanwhile: a chunk has those before it as cached
    tokens (`services/worker/composer.py`). Empty if the node would have made other steps of it."""
    chunks: list[tuple[int, int]] = []
    while R > 0 and len(chunks) < steps:
        last = steps == 1 or spec.chunk_tokens is None or spec.chunk_tokens >= R
        part = R if last else (P + (spec.chunk_tokens or 0)) // spec.block_tokens * spec.block_tokens - P
        if part <= 0:
            break  # chunks smaller than a block: no agent makes such
        chunks.append((part, P))
        R, P = R - part, P + part
    return chunks if not R and len(chunks) == steps else []


def _enough(samples: list[Sample]) -> bool:
    degrees = [sample.degree for sample in samples]
    known = [each for each in set(degrees) if degrees.count(each) >= DEGREE_SAMPLES_MIN]
    return len(samples) >= SAMPLES_MIN and len(known) >= 2


def _bounded(current: Coefficients, fitted: Coefficients, samples: list[Sample]) -> bool:
    degrees = {sample.degree for sample in samples}
    return all(
        1 / CHANGE_MAX <= fitted.prefill_us(degree, *asked) / max(1, current.prefill_us(degree, *asked)) <= CHANGE_MAX
        for degree, asked in product(degrees, ASKED)
    )
