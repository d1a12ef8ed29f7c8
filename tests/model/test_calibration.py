"""What prefills really took, by hand."""

import pytest

from shared.contracts.events import CalibrationUpdated, PrefillCompleted
from shared.contracts.ids import NodeId, RequestId, WorkerId
from shared.model import calibration as calibration_model
from shared.model import pool as pool_model
from shared.model.calibration import PPM, SAMPLES_MIN, Calibration
from shared.model.cost import Coefficients
from shared.model.parameters import Parameters
from shared.model.pool import Pool
from tests.support.story import Story, committed, registered

COST = Coefficients(version="c", d=0.0, a=1e-3, b=0.0, c=0.0, alpha=0.0)
"""1,000 tokens take a second."""

NODE, SLOW, FAST = NodeId("n0"), WorkerId("n0/1/0"), WorkerId("n0/1/4")


class Pools:
    """One node of two workers, whose events are folded as a router folds them; 100 MB/s are configured."""

    def __init__(self, fetch_half_life_s: int = 0) -> None:
        self.pool, self.calibration, self.coefficients = Pool(), Calibration(), COST
        self.parameters = Parameters(fetch_mb_per_s=100, fetch_half_life_s=fetch_half_life_s)
        self.story = Story(self._fold)
        self.story.tell(registered(epoch=1, composition=(4, 4)), committed(composition=(4, 4)))

    def _fold(self, stored: object) -> None:
        pool_model.evolve(self.pool, stored)  # type: ignore[arg-type]
        calibration_model.evolve(self.calibration, stored, self.pool, self.coefficients, self.parameters)  # type: ignore[arg-type]

    def complete(self, worker: WorkerId, measured_us: int, predicted_us: int | None, **more: object) -> None:
        done = PrefillCompleted(
            request=RequestId("r"), attempt=1, worker=worker, node_epoch=1, computed_tokens=1_000, cached_own_tokens=0,
            queue_us=0, prefill_us=measured_us, predicted_us=predicted_us,
        )  # fmt: skip
        self.story.tell(done.model_copy(update=more))


def test_a_worker_that_is_slower_by_sixty_percent_is_known_within_fifty_prefills() -> None:
    """Single ones differ by 20 %, and it was as fast as it should be before."""
    pools = Pools()
    for number in range(100):
        pools.complete(SLOW, 1_000_000 + (-1) ** number * 200_000, 1_000_000)
    assert pools.calibration.ratio_ppm(SLOW) == pytest.approx(PPM, rel=0.03)
    for number in range(50):
        pools.complete(SLOW, 1_600_000 + (-1) ** number * 300_000, 1_000_000)
        pools.complete(FAST, 1_000_000, 1_000_000)
    assert pools.calibration.ratio_ppm(SLOW) == pytest.approx(1.6 * PPM, rel=0.05)
    assert pools.calibration.ratio_ppm(FAST) == pytest.approx(PPM, rel=0.001)


def test_a_few_prefills_say_nothing() -> None:
    pools = Pools()
    for _ in range(SAMPLES_MIN - 1):
        pools.complete(SLOW, 3_000_000, 1_000_000)
    assert pools.calibration.ratio_ppm(SLOW) == PPM
    pools.complete(SLOW, 3_000_000, 1_000_000)
    assert pools.calibration.ratio_ppm(SLOW) == pytest.approx(3 * PPM, rel=0.001)


def test_one_that_hung_counts_for_sixteen_of_its_kind_at_most() -> None:
    pools = Pools()
    for _ in range(16):
        pools.complete(SLOW, 1_000_000, 1_000_000)
    pools.complete(SLOW, 10**12, 1_000_000)
    assert pools.calibration.ratio_ppm(SLOW) < 3 * PPM


@pytest.mark.parametrize("predicted_us", [None, 1])
def test_it_is_measured_by_the_coefficients_that_prices_are_made_of(predicted_us: int | None) -> None:
    """The agent says nothing, or has reckoned with another set: E(1,000, 0) is a second here."""
    pools = Pools()
    pools.coefficients = COST.model_copy(update={"version": "newer"})
    for _ in range(SAMPLES_MIN):
        pools.complete(SLOW, 2_000_000, predicted_us)
    assert pools.calibration.ratio_ppm(SLOW) == pytest.approx(2 * PPM, rel=0.001)


def test_new_coefficients_begin_anew() -> None:
    pools = Pools()
    for _ in range(20):
        pools.complete(SLOW, 2_000_000, 1_000_000)
    fitted = {**COST.model_dump(), "version": "fitted"}
    pools.story.tell(CalibrationUpdated(coefficients=fitted, samples=1, error_before=1, error_after=0))
    assert pools.calibration.ratio_ppm(SLOW) == PPM


def test_workers_that_are_no_more_are_forgotten() -> None:
    pools = Pools()
    pools.complete(SLOW, 1, 1, cached_fetched_tokens=100, fetched_from=FAST, fetch_us=6_000)
    pools.complete(WorkerId("n9/1/0"), 1, 1, cached_fetched_tokens=100, fetched_from=WorkerId("n9/1/0"))
    assert (set(pools.calibration.times), set(pools.calibration.fetches)) == ({SLOW}, {NODE})
    pools.story.tell(committed(composition=(8,), epoch=2))
    assert not pools.calibration.times
    assert pools.calibration.fetches, "the node's link is what it was"


def fetch_us(pools: Pools, node: NodeId, read_bytes: int, later_s: float = 0) -> int:
    """At 100 MB/s as configured, so long after the last event."""
    now_ns = pools.story.now_ns + round(later_s * 1e9)
    return pools.calibration.link(node, pools.parameters, now_ns).fetch_us(read_bytes)


def read(pools: Pools, tokens: int, took_us: int) -> None:
    """So many bytes from `NODE`, in as long beside the 5 ms of a set-up."""
    pools.complete(SLOW, 1, 1, cached_fetched_tokens=tokens, fetched_from=FAST, fetch_us=5_000 + took_us)


def test_a_nodes_own_bandwidth_replaces_the_configured_one() -> None:
    pools = Pools()
    assert fetch_us(pools, NODE, 1_000_000) == 15_000
    read(pools, 1_000, 4_000)
    assert fetch_us(pools, NODE, 1_000) == 9_000
    assert fetch_us(pools, NodeId("n1"), 1_000) == 5_010


def test_a_fetch_within_the_time_of_a_set_up_still_takes_something() -> None:
    pools = Pools()
    pools.complete(SLOW, 1, 1, cached_fetched_tokens=1_000, fetched_from=FAST, fetch_us=400)
    assert fetch_us(pools, NODE, 1_000) == 5_100


def test_without_a_half_life_a_measurement_counts_for_ever() -> None:
    """As in every record from before there was one."""
    pools = Pools()
    read(pools, 1_000, 4_000)
    assert fetch_us(pools, NODE, 1_000, later_s=10**6) == 9_000
    pools.story.wait(10**6)
    read(pools, 1_000, 2_000)
    # Of the first a sixteenth is gone: 938 + 1,000 bytes in 3,750 + 2,000 us.
    assert fetch_us(pools, NODE, 1_938) == 5_000 + 5_750


@pytest.mark.parametrize(
    ("later_s", "slow_us"),
    [
        (0, 1_000_000),
        (-5, 1_000_000),
        (30, 750_002),
        (60, 500_005),
        (90, 375_006),
        (120, 250_007),
        (600, 985),
        (10**9, 10),
    ],
)
def test_one_slow_read_is_forgotten_by_halves(later_s: float, slow_us: int) -> None:
    """1,000 bytes in a second, where 10 us are configured; half a minute is half of the way to the first half-life."""
    pools = Pools(fetch_half_life_s=60)
    read(pools, 1_000, 1_000_000)
    assert fetch_us(pools, NODE, 1_000, later_s) == pytest.approx(5_000 + slow_us, abs=1)


def test_what_has_been_forgotten_does_not_come_back_with_the_next_read() -> None:
    pools = Pools(fetch_half_life_s=60)
    read(pools, 1_600, 1_600_000)
    pools.story.wait(120)
    read(pools, 1_000, 2_000)
    # A quarter of the first counted, and of that a sixteenth is gone: 375 + 1,000 bytes in 375,000 + 2,000 us.
    assert fetch_us(pools, NODE, 1_375) == 5_000 + 377_000
    pools.story.wait(-300)
    read(pools, 1_000, 2_000)
    assert pools.calibration.fetches[NODE].last_ns == pools.story.now_ns + 300 * 10**9, (
        "an agent's clock that is behind"
    )
