"""What prefills really took: each worker's measured over predicted time, and the bandwidth of each node that others fetch from.

A fold over `prefill-completed` in stream order, in whole numbers, so that every reader of the log prices alike. A worker's
ratio is that of its last `MEMORY` or so prefills, 1 until `SAMPLES_MIN` of them were seen. New coefficients begin anew.

Whose bandwidth looks bad is read from no more, so nothing would ever show that it has become better. What was measured
therefore counts half after every `fetch_half_life_s` without a read, and what is configured for the rest.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from shared.contracts.envelope import Stored
from shared.contracts.events import CalibrationUpdated, EpochCommitted, PrefillCompleted
from shared.contracts.ids import NodeId, WorkerId, node_of
from shared.model.cost import Coefficients
from shared.model.parameters import Parameters
from shared.model.pool import Node, Pool

MEMORY = 16
"""Prefills after which a sample counts for about a third: a GPU that slows down is priced within a few dozen requests."""

SAMPLES_MIN = 8
"""A single prefill says little: its step may have been disturbed."""

RATIO_MAX = 16
"""One prefill counts as this many times its prediction at most, and at least as the inverse."""

FETCH_SETUP_US = 5_000
"""What a fetch takes beside its bytes (model, 2.2)."""

PPM = 1_000_000


class Sums(NamedTuple):
    """Decayed sums of a numerator and a denominator, and how many went into them."""

    above: int = 0
    below: int = 0
    samples: int = 0

    def plus(self, above: int, below: int) -> "Sums":
        return Sums(
            self.above - self.above // MEMORY + above, self.below - self.below // MEMORY + below, self.samples + 1
        )


class Reads(NamedTuple):
    """Bytes read from a node over microseconds, and when the last of them were, by the clock of the event that says so."""

    sums: Sums = Sums()
    last_ns: int = 0


class Link(NamedTuple):
    """`read_bytes` took `read_us`, of which `kept_ppm` count; for the rest it is as configured."""

    mb_per_s: int
    read_bytes: int = 1
    read_us: int = 0
    kept_ppm: int = 0

    def fetch_us(self, wanted_bytes: int) -> int:
        """How long that much takes."""
        configured_us = wanted_bytes // self.mb_per_s
        more_us = wanted_bytes * self.read_us // self.read_bytes - configured_us
        return FETCH_SETUP_US + configured_us + more_us * self.kept_ppm // PPM


@dataclass(slots=True)
class Calibration:
    """State of the fold; `evolve` is its only writer."""

    times: dict[WorkerId, Sums] = field(default_factory=dict)
    fetches: dict[NodeId, Reads] = field(default_factory=dict)

    def ratio_ppm(self, worker: WorkerId) -> int:
        """Measured over predicted time, in millionths."""
        sums = self.times.get(worker)
        if sums is None or sums.samples < SAMPLES_MIN:
            return PPM
        return sums.above * PPM // sums.below

    def link(self, source: NodeId, parameters: Parameters, now_ns: int) -> Link:
        """What reading from a node takes now."""
        if (reads := self.fetches.get(source)) is None:
            return Link(parameters.fetch_mb_per_s)
        kept_ppm = _kept_ppm(now_ns - reads.last_ns, parameters)
        return Link(parameters.fetch_mb_per_s, reads.sums.above, reads.sums.below, kept_ppm)


def _kept_ppm(age_ns: int, parameters: Parameters) -> int:
    """How much of a measurement of this age counts: half after each half-life, and in between along a straight line, so that
    every machine says the same. All of it without a half-life."""
    half_ns = parameters.fetch_half_life_s * 10**9
    if not half_ns or age_ns <= 0:
        return PPM
    halvings, rest_ns = divmod(age_ns, half_ns)
    return (PPM >> halvings) * (2 * half_ns - rest_ns) // (2 * half_ns)


def evolve(
    calibration: Calibration, stored: Stored, pool: Pool, coefficients: Coefficients, parameters: Parameters
) -> None:
    """Fold one event. The others are as of it."""
    match stored.data:
        case PrefillCompleted() as data:
            if (worker := pool.workers.get(data.worker)) is not None:
                _time(calibration, data, worker.degree, pool, coefficients)
            if data.fetched_from is not None and data.cached_fetched_tokens:
                source = pool.nodes.get(node_of(data.fetched_from))
                _fetch(calibration, data, source, parameters, stored.event.time_ns)
        case EpochCommitted() as data:
            for gone in [each for each in calibration.times if node_of(each) == data.node and each not in pool.workers]:
                del calibration.times[gone]
        case CalibrationUpdated():
            calibration.times.clear()
        case _:
            pass


def _time(
    calibration: Calibration, data: PrefillCompleted, degree: int, pool: Pool, coefficients: Coefficients
) -> None:
    spec = pool.nodes[node_of(data.worker)].spec
    cached_tokens = data.cached_own_tokens + data.cached_in_flight_tokens + data.cached_fetched_tokens
    predicted_us = data.predicted_us
    if predicted_us is None or spec is None or spec.coefficients_version != coefficients.version:
        # The agent has said nothing, or has reckoned with another set than the one that prices are made of.
        predicted_us = coefficients.prefill_us(degree, data.computed_tokens, cached_tokens)
    if predicted_us > 0:
        measured_us = min(max(data.prefill_us, predicted_us // RATIO_MAX, 1), predicted_us * RATIO_MAX)
        calibration.times[data.worker] = calibration.times.get(data.worker, Sums()).plus(measured_us, predicted_us)


def _fetch(
    calibration: Calibration, data: PrefillCompleted, source: Node | None, parameters: Parameters, now_ns: int
) -> None:
    """Bytes over the microseconds that they took beside the set-up, which is never all of the time."""
    if source is not None and source.spec is not None:
        read_us = max(data.fetch_us - FETCH_SETUP_US, data.fetch_us // 4, 1)
        sums, last_ns = calibration.fetches.get(source.id, Reads())
        kept_ppm = _kept_ppm(now_ns - last_ns, parameters)
        faded = Sums(sums.above * kept_ppm // PPM, sums.below * kept_ppm // PPM, sums.samples)
        read = faded.plus(data.cached_fetched_tokens * source.spec.kv_bytes_per_token, read_us)
        calibration.fetches[source.id] = Reads(read, max(last_ns, now_ns))
