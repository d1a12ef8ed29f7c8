"""What is kept of dropped events tells the same as all of them, wherever the log begins."""

import zlib
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.controller import decider as controller
from services.worker import decider as worker
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import (
    CacheLeadershipTaken,
    CacheScanCompleted,
    CalibrationUpdated,
    CompositionPinned,
    CompositionUnpinned,
    Cordoned,
    DrainCompleted,
    DrainStarted,
    EpochAborted,
    Frozen,
    LeadershipTaken,
    NodeDeclaredLost,
    NodeLost,
    ParametersChanged,
    RankAdoptedEpoch,
    ReconfigurationPlanned,
    RouterLost,
    RouterRegistered,
    Thawed,
    Uncordoned,
    WindowClosed,
)
from shared.contracts.ids import NodeId, RouterId, WorkerId
from shared.model.holders import Holders
from shared.model.holders import evolve as evolve_holders
from shared.model.keepsake import Keepsake, evolve
from shared.model.parameters import Parameters
from shared.model.pool import Node, Pool
from shared.runtime.keepsake import BadKeepsake, is_newer, pack, unpack
from tests.support.story import Story, adopted, committed, received, registered

N0, N1 = NodeId("n0"), NodeId("n1")


def keep(events: list[Stored]) -> Keepsake:
    keepsake = Keepsake()
    for stored in events:
        evolve(keepsake, stored)
    return keepsake


def start(events: list[Stored], first_seq: int, kept_to_seq: int) -> list[Stored]:
    """What a process folds that starts on a log that begins at `first_seq`, next to a record of everything up to
    `kept_to_seq`."""
    recalled = unpack(pack(keep(events[:kept_to_seq]), "story"), "story")
    assert (recalled.seen_seq, all(each.kept for each in recalled.events)) == (kept_to_seq, True)
    return [each for each in recalled.events if each.stream_seq < first_seq] + events[first_seq - 1 :]


@dataclass
class Known:
    """What must be the same, as the controller folds it."""

    pool: Pool
    parameters: Parameters
    routers: dict[Any, Any]
    term: int
    profiled_us: dict[NodeId, int]
    sagas: dict[NodeId, Any]
    last_epoch: dict[NodeId, int] = field(default_factory=dict)


def known(events: list[Stored]) -> Known:
    state = controller.initial()
    for stored in events:
        controller.evolve(state, stored)
    # A node of which nothing is left to tell is no node.
    state.pool.nodes = {node.id: node for node in state.pool.nodes.values() if node != Node(node.id)}
    return Known(
        state.pool,
        state.parameters,
        state.routers,
        state.term,
        state.windows.profiled_us,
        # Of a broken one only that it is counts: it is aborted next.
        {node: (saga.plan, saga.broken) if saga.broken else saga for node, saga in state.sagas.open.items()},
        state.sagas.last_epoch,
    )


def cuts(length: int, data: st.DataObject) -> list[tuple[int, int]]:
    """Where the log begins and how far the record goes: everything dropped, the record new or old."""
    kept_to_seq = data.draw(st.integers(0, length))
    return [
        (length + 1, length),
        (data.draw(st.integers(1, length + 1)), length),
        (data.draw(st.integers(1, kept_to_seq + 1)), kept_to_seq),
    ]


NODES, INCARNATIONS, RANKS = st.sampled_from([N0, N1]), st.integers(1, 4), st.integers(0, 7)
CHANGES = st.dictionaries(
    st.sampled_from(["theta_intra", "theta_reclaim", "window_s", "beta"]), st.sampled_from([1, 2, 3, 40]), min_size=1
)
FACTS = st.one_of(
    st.builds(registered, node=NODES, incarnation=INCARNATIONS, epoch=st.integers(0, 3)),
    st.builds(NodeLost, node=NODES, incarnation=INCARNATIONS, reason=st.just("r")),
    st.builds(NodeDeclaredLost, node=NODES, incarnation=INCARNATIONS, silent_us=st.just(1)),
    st.builds(
        RankAdoptedEpoch,
        node=NODES,
        incarnation=INCARNATIONS,
        rank=RANKS,
        epoch=st.integers(1, 3),
        switch_us=st.just(1),
    ),
    st.builds(
        committed, node=NODES, epoch=st.integers(1, 3), composition=st.sampled_from([(8,), (4, 4), (1, 1, 2, 4)])
    ),
    st.builds(EpochAborted, node=NODES, epoch=st.integers(1, 3), step=st.just("draining"), reason=st.just("r")),
    st.builds(
        DrainStarted,
        node=NODES,
        epoch=st.integers(1, 3),
        workers=st.sampled_from([(), (WorkerId("n0/1/0"),)]),
        deadline_us=st.just(1),
    ),
    st.builds(Cordoned, node=NODES, asked_by=st.just("ops")),
    st.builds(Uncordoned, node=NODES, asked_by=st.just("ops")),
    st.builds(CompositionPinned, node=NODES, asked_by=st.just("ops")),
    st.builds(CompositionUnpinned, node=NODES, asked_by=st.just("ops")),
    st.builds(ParametersChanged, parameters_version=st.integers(1, 9), changes=CHANGES, asked_by=st.just("ops")),
    st.builds(Frozen, asked_by=st.just("ops")),
    st.builds(Thawed, asked_by=st.just("ops")),
    st.builds(RouterRegistered, router=st.just(RouterId("r"))),
    st.builds(RouterLost, router=st.just(RouterId("r")), source=st.sampled_from(["s0", "s1"])),
)


@given(st.lists(st.tuples(FACTS, st.sampled_from(["s0", "s1"])), min_size=10, max_size=40), st.data())
@settings(max_examples=200, deadline=None)
def test_kept_and_remaining_events_tell_what_all_of_them_tell(
    told: list[tuple[EventData, str]], data: st.DataObject
) -> None:
    """In any order, however wrong: each event does something to nodes, parameters or routers."""
    story = Story()
    for fact, source in told:
        story.tell(fact, source=source)
    whole = known(story.events)
    for first_seq, kept_to_seq in cuts(len(told), data):
        started = known(start(story.events, first_seq, kept_to_seq))
        assert started.pool == whole.pool
        assert started.parameters == whole.parameters
        assert started.routers == whole.routers


class Life:
    """A pool as it is in fact: each event follows from those before."""

    def __init__(self, choose: st.DataObject) -> None:
        self.story = Story()
        self._choose = choose
        self._incarnation = {N0: 0, N1: 0}
        self._epoch = {N0: 0, N1: 0}
        self._last_epoch = {N0: 0, N1: 0}
        self._saga: dict[NodeId, int] = {}
        self._version = self._term = 0

    def go_on(self) -> None:
        node = self._choose.draw(NODES)
        self.story.wait(1)
        match self._choose.draw(st.integers(0, 9)):
            case 0:
                self._register(node)
            case 1 | 2 | 3 | 4:
                self._reconfigure(node)
            case 5:
                self._version += 1
                changes = self._choose.draw(CHANGES)
                self._tell(ParametersChanged(parameters_version=self._version, changes=changes, asked_by="ops"))
            case 6:
                self._term += 1
                self._tell(LeadershipTaken(leader="c", term=self._term))
            case 7:
                self._tell(NodeLost(node=node, incarnation=self._incarnation[node], reason="r"))
            case 8:
                self._tell(NodeDeclaredLost(node=node, incarnation=self._incarnation[node], silent_us=1))
            case _:
                self._tell(received(f"r{len(self.story.events)}", 7))

    def _tell(self, *facts: EventData) -> None:
        self.story.tell(*facts)

    def _register(self, node: NodeId) -> None:
        self._incarnation[node] += 1
        self._tell(registered(node, self._incarnation[node], epoch=self._epoch[node]))

    def _reconfigure(self, node: NodeId) -> None:
        """The next step, or an abort."""
        if not self._incarnation[node]:
            return self._register(node)
        if node not in self._saga:
            self._saga[node] = 0
            self._last_epoch[node] += 1
        epoch, step = self._last_epoch[node], self._saga[node]
        retiring, coming = (WorkerId(f"{node}/{epoch - 1}/0"),), (WorkerId(f"{node}/{epoch}/0"),)
        steps: list[list[EventData]] = [
            [
                ReconfigurationPlanned(
                    node=node,
                    epoch=epoch,
                    policy="p",
                    reason="r",
                    old_composition=(8,),
                    new_composition=(4, 4),
                    retiring=retiring,
                    coming=coming,
                )
            ],
            [DrainStarted(node=node, epoch=epoch, workers=retiring, deadline_us=1)],
            [DrainCompleted(node=node, node_epoch=epoch - 1, workers=retiring, returned_requests=0, drain_us=epoch)],
            list(adopted(node, epoch, incarnation=self._incarnation[node])),
            [committed(node, epoch, (4, 4))],
        ]
        if step and self._choose.draw(st.integers(0, 4)) == 0:
            self._tell(EpochAborted(node=node, epoch=epoch, step="draining", reason="r"))
            del self._saga[node]
            return None
        self._tell(*steps[step])
        self._saga[node] += 1
        if self._saga[node] == len(steps):
            del self._saga[node]
            self._epoch[node] = epoch
        return None


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_new_leader_and_a_restarted_agent_go_on_where_they_were(data: st.DataObject) -> None:
    life = Life(data)
    for _ in range(data.draw(st.integers(10, 40))):
        life.go_on()
    events = life.story.events
    whole = known(events)
    for first_seq, kept_to_seq in cuts(len(events), data):
        started = start(events, first_seq, kept_to_seq)
        assert known(started) == whole
        for node in (N0, N1):
            assert known_to_agent(node, started) == known_to_agent(node, events)


def known_to_agent(node: NodeId, events: list[Stored]) -> tuple[Any, ...]:
    state = worker.initial(node, 1)
    for stored in events:
        worker.evolve(state, stored)
    return state.incarnation, state.alive, state.committed, state.term


LOST, ABORTED = NodeLost(node=N0, incarnation=1, reason="r"), EpochAborted(node=N0, epoch=2, step="planned", reason="r")
DRAIN = DrainStarted(node=N0, epoch=2, workers=(WorkerId("n0/1/0"),), deadline_us=1)
DRAINED = DrainCompleted(node=N0, node_epoch=1, workers=DRAIN.workers, returned_requests=0, drain_us=1)


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ([Cordoned(node=N0, asked_by="ops"), Uncordoned(node=N0, asked_by="ops")], []),
        ([CompositionPinned(node=N0, asked_by="ops"), CompositionUnpinned(node=N0, asked_by="ops")], []),
        ([Frozen(asked_by="ops"), Thawed(asked_by="ops")], []),
        ([RouterRegistered(router=RouterId("r")), RouterLost(router=RouterId("r"), source="somebody-1-0000")], []),
        ([LOST, registered()], ["node-registered"]),
        ([registered(), *adopted(), LOST, registered(incarnation=2)], ["node-registered"]),
        ([registered(incarnation=2), registered(), LOST, *adopted(incarnation=1)], ["node-registered"]),
        ([registered(), LOST], ["node-registered", "node-lost"]),
        ([DRAIN, DRAINED], ["drain-started", "drain-completed"]),
        ([DRAIN, DRAINED, ABORTED], ["epoch-aborted"]),
        ([committed(epoch=2), DRAIN, DRAINED, ABORTED], ["epoch-committed"]),
        ([ABORTED, committed(epoch=2)], ["epoch-committed"]),
        ([ABORTED, committed(epoch=1)], ["epoch-aborted", "epoch-committed"]),
        ([received("r", 1)], []),
    ],
)
def test_what_is_void_goes(told: list[EventData], kept: list[str]) -> None:
    story = Story()
    story.tell(*told)
    assert [stored.data.TYPE for stored in keep(story.events).kept.values()] == kept


def test_a_worker_keeps_the_window_that_its_capacity_was_committed_for() -> None:
    story = Story()
    story.tell(ParametersChanged(parameters_version=1, changes={"window_s": 40}, asked_by="ops"), committed())
    story.tell(ParametersChanged(parameters_version=2, changes={"window_s": 3}, asked_by="ops"))
    started = known(start(story.events, len(story.events) + 1, len(story.events)))
    assert (started.parameters.window_s, started.profiled_us) == (3, {N0: 40_000_000})


def test_what_is_kept_does_not_grow_with_time() -> None:
    story = Story()
    for n in range(1, 300):
        story.tell(registered(incarnation=n, epoch=n - 1), *adopted(epoch=n, incarnation=n), committed(epoch=n))
        story.tell(EpochAborted(node=N0, epoch=n, step="planned", reason="r"))
        story.tell(ParametersChanged(parameters_version=n, changes={"beta": 1 + n % 7, "lam": n % 3}, asked_by="ops"))
        story.tell(RouterRegistered(router=RouterId("r")), source=f"router-{n}")
        story.tell(
            RouterLost(router=RouterId("r"), source=f"router-{n}"), Frozen(asked_by="ops"), Thawed(asked_by="ops")
        )
        story.tell(LeadershipTaken(leader="c", term=n), CacheLeadershipTaken(leader="m", term=n))
    kept = [stored.data.TYPE for stored in keep(story.events).kept.values()]
    assert kept.count("rank-adopted-epoch") == 8
    assert sorted(set(kept)) == [
        "cache-leadership-taken",
        "epoch-committed",
        "leadership-taken",
        "node-registered",
        "parameters-changed",
        "rank-adopted-epoch",
    ]
    assert len(kept) == 8 + 5, kept


def test_a_thousand_nodes_fit_in_a_record() -> None:
    story = Story()
    for n in range(1_000):
        node = f"node-{n}"
        story.tell(registered(node), *adopted(node), committed(node, 1, (1, 1, 2, 4)), source=f"worker-{node}-0a1b2c3d")
    keepsake = keep(story.events)
    assert len(keepsake.kept) == 10_000
    packed = pack(keepsake, "story")
    assert unpack(packed, "story").events == tuple(each._replace(kept=True) for each in story.events)


def test_windows_and_scans_are_kept_without_haste() -> None:
    window = WindowClosed(
        k=9,
        from_seq=1,
        to_seq=2,
        length_us=1,
        requests=0,
        completed=0,
        prompt_tokens=0,
        demand_us=0,
        long_tokens=1,
        long_request_share=0,
        long_token_share=0,
        capacity_us=1,
    )
    scan = CacheScanCompleted(
        scan=9, to_seq=2, nodes=0, holders=0, inter_candidates=0, intra_candidates=0, reclaim_candidates=0
    )
    story = Story()
    story.tell(registered())
    before = keep(story.events).changes
    story.tell(window, scan, received("r", 1))
    keepsake = keep(story.events)
    assert (keepsake.changes, len(keepsake.kept), keepsake.seen_seq) == (before, 3, 4)


def test_another_log_inherits_what_outlives_a_log() -> None:
    story = Story()
    story.tell(registered(), *adopted(), committed(), Cordoned(node=N0, asked_by="ops"), Frozen(asked_by="ops"))
    story.tell(ParametersChanged(parameters_version=1, changes={"beta": 5}, asked_by="ops"))
    story.tell(CalibrationUpdated(coefficients={"d": 1.0}, samples=1, error_before=1, error_after=0))
    lasting = len(story.events)
    story.tell(LeadershipTaken(leader="c", term=3), DrainStarted(node=N0, epoch=2, workers=(), deadline_us=1))
    story.tell(RouterRegistered(router=RouterId("r")))
    recalled = unpack(pack(keep(story.events), "story"), "another")
    assert recalled.seen_seq == 0
    assert [each.event for each in recalled.events] == [each.event for each in story.events[:lasting]]
    assert {(each.log, each.stream_seq, each.kept) for each in recalled.events} == {("another", 0, True)}


def test_a_worker_is_blind_until_it_is_reported_if_its_beginning_was_dropped() -> None:
    story = Story()
    story.tell(registered(), *adopted(), committed(composition=(4, 4)))
    holders = Holders()
    for stored in start(story.events, len(story.events) + 1, len(story.events)):
        evolve_holders(holders, stored)
    assert [held.trust for held in holders.workers.values()] == ["blind", "blind"]
    story.tell(registered(incarnation=2, epoch=1, composition=(4, 4)))
    evolve_holders(holders, story.events[-1])
    assert [held.trust for held in holders.workers.values()] == ["exact", "exact"], "a new incarnation is empty"


def test_a_record_that_cannot_be_read_is_refused() -> None:
    packed = pack(keep([]), "story")
    for bad in (b"x", packed[:-3], zlib.compress(b'{"format": 2}'), zlib.compress(b"[]")):
        with pytest.raises(BadKeepsake, match="cannot be read"):
            unpack(bad, "story")
        with pytest.raises(BadKeepsake, match="cannot be read"):
            is_newer(bad, "story", 1)


def test_a_record_that_an_operator_has_deleted_is_none() -> None:
    assert unpack(b"", "story") == (0, ())
    assert not is_newer(b"", "story", 0)


def test_the_newer_record_of_one_log() -> None:
    story = Story()
    story.tell(registered(), committed())
    packed = pack(keep(story.events), "story")
    assert [is_newer(packed, "story", seq) for seq in (1, 2, 3)] == [True, False, False]
    assert not is_newer(packed, "another", 1)
