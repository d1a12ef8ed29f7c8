"""A new pool is opened once, by whoever leads it first; no other pool is."""

import asyncio
from contextlib import AsyncExitStack

from controller_world import ControllerStory
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.embedded.nats import EmbeddedNats
from services.controller import decider
from services.controller.hosting import Hosted, host
from services.controller.opening import NEW_POOL, opening
from services.controller.settings import ControllerSettings
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import (
    LeadershipTaken,
    NodeDeclaredLost,
    NodeLost,
    ParametersChanged,
    RouterLost,
    RouterRegistered,
)
from shared.contracts.ids import NodeId, RouterId
from shared.model import keepsake as keepsake_model
from shared.model.keepsake import Keepsake
from shared.model.parameters import RECOMMENDED, Parameters, changed, unlike_new_pools
from shared.runtime.lease import CellLease
from shared.runtime.memory import MemoryCell
from shared.runtime.projection import Projection
from shared.runtime.service import Runtime, open_runtime
from simulation.scoring import InlineScorer
from tests.support.replica import eventually
from tests.support.story import committed, received, registered

N0 = NodeId("n0")


def test_what_new_pools_begin_with() -> None:
    story = ControllerStory()
    [fact] = opening(story.state, first_seq=1, kept_events=0)
    assert fact == ParametersChanged(
        parameters_version=1,
        changes={
            "placement_policy": "vertumnus",
            "ratio_in_own_time": True,
            "refit": True,
            "fetch_half_life_s": 60,
            "cache_policy": "regret",
            "scan_every_s": 0.5,
            "reconfiguration_policy": "forecast",
        },
        asked_by="new pool",
        reason="what is recommended for new pools",
    )
    story.tell(decider.take_leadership(story.state, "c1", 1), fact)
    assert story.state.parameters == changed(Parameters(), RECOMMENDED)
    assert unlike_new_pools(story.state.parameters.model_dump()) == {}
    assert unlike_new_pools(Parameters().model_dump()) == RECOMMENDED
    assert unlike_new_pools({**RECOMMENDED, "scan_every_s": 2.0}) == {"scan_every_s": 0.5}


def test_the_base_is_what_old_records_begin_with() -> None:
    """These four may never change: whatever was recorded before the first `parameters-changed` was decided by them."""
    base = Parameters()
    assert (base.placement_policy, base.cache_policy, base.scan_every_s, base.reconfiguration_policy, base.version) == (
        "paper",
        "lru",
        1.0,
        "paper",
        0,
    )


FACTS: st.SearchStrategy[EventData] = st.one_of(
    st.builds(registered, st.just("n0"), st.integers(1, 2)),
    st.builds(NodeLost, node=st.just(N0), incarnation=st.just(1), reason=st.just("r")),
    st.builds(NodeDeclaredLost, node=st.just(N0), incarnation=st.just(1), silent_us=st.just(1)),
    st.builds(RouterRegistered, router=st.just(RouterId("r"))),
    st.builds(RouterLost, router=st.just(RouterId("r")), source=st.just("s")),
    st.builds(received, st.just("a"), st.just(7)),
    st.builds(LeadershipTaken, leader=st.just("old"), term=st.integers(1, 3)),
    st.builds(committed, node=st.just("n0"), epoch=st.just(1), composition=st.just((8,))),
    st.builds(
        ParametersChanged, parameters_version=st.just(1), changes=st.just({"beta": 4.0}), asked_by=st.just("ops")
    ),
)


@given(st.lists(FACTS, max_size=8), st.integers(0, 8), st.booleans(), st.integers(1, 5))
@settings(max_examples=150)
def test_a_pool_with_a_past_is_not_opened(told: list[EventData], dropped: int, kept: bool, later: int) -> None:
    """Whatever the past was, whether or not the log has dropped a part of it, and whether or not that was kept. What routers
    and agents say before anybody leads is no past."""
    story = ControllerStory()
    story.tell(*told)
    dropped = min(dropped, len(told))
    keepsake = Keepsake()
    for stored in story.events:
        keepsake_model.evolve(keepsake, stored)
    recalled = [each for each in keepsake.kept.values() if kept and each.stream_seq <= dropped]
    state = decider.initial()
    for stored in [*recalled, *story.events[dropped:]]:
        decider.evolve(state, stored)
    has_led = any(isinstance(each, LeadershipTaken) for each in told)
    decided = any(isinstance(each, ParametersChanged) for each in told)
    facts = opening(state, dropped + 1, len(recalled))
    if has_led or dropped:
        assert facts == []
    elif not decided:
        assert [each.changes for each in facts] == [dict(RECOMMENDED)]
    # Whoever comes later, however often: once.
    for fact in [decider.take_leadership(state, "c", 1, dropped + 1, len(recalled)), *facts]:
        seq = story.tell(fact)
        decider.evolve(state, story.events[seq - 1])
    assert all(opening(state, 1, 0) == [] for _ in range(later))


async def test_two_controllers_that_start_at_once_open_a_pool_once(nats_server: EmbeddedNats) -> None:
    """Each pool with one lease for both, and with one for each: then only the fence is left between them."""
    for number, share in enumerate((True, False, True, False)):
        pool = ControllerSettings(nats_url=nats_server.url, pool=f"pool-{number}", stream_bytes_max=1 << 26)
        await _started_at_once(pool, share_lease=share)


async def _started_at_once(pool: ControllerSettings, *, share_lease: bool) -> None:
    async with AsyncExitStack() as stack:
        names = ("witness", "a", "b")
        watching, *runtimes = [await stack.enter_async_context(open_runtime(pool, name)) for name in names]
        seen: list[Stored] = []
        everything = [watching.subjects.all_events]
        witness = Projection(watching.log, everything, None, lambda _, stored: seen.append(stored))
        await witness.start()
        starting = [each if share_lease else _with_a_lease_of_its_own(each) for each in runtimes]
        hosted = await asyncio.gather(*(host(pool, each, InlineScorer()) for each in starting))
        terms = 1 if share_lease else 2
        await eventually(lambda: all(each.state.term >= terms for each in hosted))
        await eventually(lambda: _count(seen, LeadershipTaken) >= terms)
        first, opened, *_ = seen
        assert isinstance(first.data, LeadershipTaken)
        assert isinstance(opened.data, ParametersChanged)
        assert opened.event.source == first.event.source
        assert (opened.data.asked_by, _count(seen, ParametersChanged)) == (NEW_POOL.asked_by, 1)
        assert all(unlike_new_pools(each.state.parameters.model_dump()) == {} for each in hosted)
        await _end(hosted)
        await witness.stop()


def _with_a_lease_of_its_own(runtime: Runtime) -> Runtime:
    """As where a lease has run out unnoticed: this process believes that nobody else leads."""
    cell = MemoryCell()
    return runtime._replace(lease=lambda _: CellLease(cell, runtime.source, runtime.clock))


def _count(events: list[Stored], kind: type[EventData]) -> int:
    return sum(isinstance(each.data, kind) for each in events)


async def _end(hosted: list[Hosted]) -> None:
    for each in hosted:
        await each.controller.stop()
        for failure in each.failures:
            failure.close()  # a coroutine that nobody awaits
