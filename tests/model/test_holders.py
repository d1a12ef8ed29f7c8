"""Which worker holds which block: told by hand, and against a model of agents that tell the truth."""

from collections.abc import Sequence
from functools import partial
from hashlib import blake2b

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.contracts.events import (
    BlockRun,
    BlocksEvicted,
    BlocksStored,
    CacheReported,
    EpochAborted,
    NodeDeclaredLost,
    NodeLost,
    PlacementReconciled,
    ReconciledWorker,
    RequestReceived,
    RouterLost,
)
from shared.contracts.ids import BlockId, NodeId, RequestId, RouterId, WorkerId
from shared.model import holders as holders_module
from shared.model.holders import Holders, evolve
from tests.support.story import Story, committed, completed, received, registered, serving

N0 = NodeId("n0")
W0, W4 = WorkerId("n0/1/0"), WorkerId("n0/1/4")


def path(names: str) -> list[BlockId]:
    """The blocks of one path, a block a letter: equal beginnings are equal blocks."""
    return [BlockId(blake2b(names[: i + 1].encode(), digest_size=16).digest()) for i in range(len(names))]


def run(names: str, below: int = 0) -> BlockRun:
    """The blocks of `names` from depth `below` on."""
    blocks = path(names)
    return BlockRun(parent=blocks[below - 1] if below else None, block_ids=b"".join(blocks[below:]))


class HoldersStory(Story):
    """`holders` has folded everything told; every change is checked."""

    def __init__(self) -> None:
        self.holders = Holders()
        super().__init__(partial(evolve, self.holders))
        self.tell(*serving("n0"))

    def receives(self, request: str, names: str, source: str = "router-1") -> None:
        self.tell(received(request, 1_000, block_ids=b"".join(path(names))), source=source)

    def prefills(self, request: str, number: int, first_depth: int, blocks: int, worker: WorkerId = W0) -> None:
        self.tell(
            BlocksStored(
                worker=worker,
                incarnation=1,
                number=number,
                cause="prefill",
                request=RequestId(request),
                first_depth=first_depth,
                blocks=blocks,
            )
        )
        self.holders.check()

    def stores(self, number: int, *runs: BlockRun, worker: WorkerId = W0, incarnation: int = 1) -> None:
        self.tell(
            BlocksStored(
                worker=worker, incarnation=incarnation, number=number, cause="replication", blocks=1, runs=runs
            )
        )
        self.holders.check()

    def evicts(self, number: int, names: str, keep: int, worker: WorkerId = W0) -> None:
        gone = reversed(path(names)[keep:])
        self.tell(
            BlocksEvicted(worker=worker, incarnation=1, number=number, cause="pressure", block_ids=b"".join(gone))
        )
        self.holders.check()

    def reports(self, number: int, *parts: list[BlockRun], worker: WorkerId = W0, incarnation: int = 1) -> None:
        for part, runs in enumerate(parts, 1):
            self.tell(report(number, part, len(parts), runs, worker, incarnation))
        self.holders.check()

    def matched(self, names: str, worker: WorkerId = W0) -> int:
        return self.holders.matched(path(names)).get(worker, 0)


def report(
    number: int, part: int, parts: int, runs: list[BlockRun], worker: WorkerId = W0, incarnation: int = 1
) -> CacheReported:
    return CacheReported(
        worker=worker, incarnation=incarnation, number=number, part=part, parts=parts, runs=tuple(runs)
    )


@pytest.fixture
def story() -> HoldersStory:
    return HoldersStory()


def test_a_prefill_stores_a_depth_range_of_its_requests_chain(story: HoldersStory) -> None:
    story.receives("q1", "abcd")
    story.prefills("q1", 1, 0, 3)
    assert [story.matched(names) for names in ("abcd", "ab", "abx", "x", "")] == [3, 2, 2, 0, 0]
    story.prefills("q1", 2, 3, 1)
    assert story.matched("abcd") == 4
    assert story.matched("abcd", W4) == 0
    assert story.holders.index.holders(path("a")[0]) == [W0]


def test_a_chain_outlives_its_request_for_a_while(story: HoldersStory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders_module, "ENDED_CHAINS_MAX", 2)
    for number in range(1, 4):
        story.receives(f"q{number}", "abcd"[:number])
        story.tell(completed(f"q{number}", W0, 1))
    assert set(story.holders.chains) == {"q2", "q3"}
    story.prefills("q3", 1, 0, 3)
    assert story.matched("abc") == 3
    story.prefills("q1", 2, 0, 1)
    assert (story.matched("abc"), story.holders.trust(W0)) == (0, "degraded"), "what it stored can no longer be known"


def test_ended_chains_are_kept_by_their_blocks(story: HoldersStory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders_module, "ENDED_BLOCKS_MAX", 4)
    story.receives("open", "abcdefgh")
    for request, names in (("q1", "ab"), ("q2", "cd"), ("q3", "efg")):
        story.receives(request, names)
        story.tell(completed(request, W0, 1))
        story.holders.check()
    assert set(story.holders.chains) == {"open", "q3"}, "q2 and q3 would be five"
    story.tell(completed("q3", W0, 1))
    story.receives("q4", "x")
    story.tell(completed("q4", W0, 1), completed("never-received", W0, 1))
    assert (set(story.holders.ended), story.holders.ended_blocks) == ({"q3", "q4", "never-received"}, 4)
    story.tell(completed("open", W0, 1))
    assert (set(story.holders.chains), story.holders.ended_blocks) == (set(), 0), "one chain beyond the bound"
    story.holders.check()


def test_a_lost_router_ends_its_requests_alone(story: HoldersStory) -> None:
    story.receives("q1", "a", source="router-1")
    story.receives("q2", "b", source="router-2")
    story.tell(RouterLost(router=RouterId("r1"), source="router-1"))
    assert set(story.holders.open) == {"q2"}
    story.receives("q3", "c", source="router-1")
    assert set(story.holders.open) == {"q2"}, "it did not know yet"
    assert set(story.holders.ended) == {"q1", "q3"}
    story.holders.check()


def test_evictions_shorten_the_match(story: HoldersStory) -> None:
    story.stores(1, run("abcd"), run("abxy", below=2))
    story.evicts(2, "abxy", keep=2)
    assert (story.matched("abcd"), story.matched("abxy")) == (4, 2)
    story.evicts(3, "abcd", keep=0)
    assert story.matched("abcd") == 0
    assert not story.holders.index.index


def test_a_prefix_with_a_hole_is_no_prefix(story: HoldersStory) -> None:
    story.stores(1, run("abcd", below=2))
    assert not story.holders.index.counts


def test_after_a_gap_only_what_is_confirmed_counts_until_a_report(story: HoldersStory) -> None:
    story.stores(1, run("abcd"))
    story.stores(3, run("xy"))
    assert (story.holders.trust(W0), story.matched("abcd"), story.matched("xy")) == ("degraded", 0, 2)
    story.reports(3, [run("abcd")], [run("xy")])
    assert (story.holders.trust(W0), story.matched("abcd"), story.matched("xy")) == ("exact", 4, 2)
    story.stores(4, run("z"))
    assert story.holders.trust(W0) == "exact"


def test_an_incarnation_that_was_not_registered_is_blind_until_a_report(story: HoldersStory) -> None:
    story.stores(1, run("abcd"))
    story.stores(1, run("xy"), incarnation=2)
    assert (story.holders.trust(W0), story.matched("abcd"), story.matched("xy")) == ("blind", 0, 0)
    assert not story.holders.index.counts, "what the one before held is gone with it"
    story.stores(3, run("z"), incarnation=2)
    assert story.holders.trust(W0) == "blind", "a gap does not raise trust"
    story.reports(3, [run("xy")], incarnation=2)
    assert (story.holders.trust(W0), story.matched("xy")) == ("exact", 2)


def test_words_of_an_older_incarnation_are_ignored(story: HoldersStory) -> None:
    story.tell(registered(incarnation=2, epoch=1))
    story.stores(1, run("ab"), incarnation=1)
    story.reports(5, [run("ab")], incarnation=1)
    assert (story.holders.trust(W0), story.matched("ab")) == ("exact", 0)
    story.stores(1, run("ab"), incarnation=2)
    assert (story.holders.trust(W0), story.matched("ab")) == ("exact", 2)


def test_a_report_that_contradicts_an_exact_belief_is_counted_and_believed(story: HoldersStory) -> None:
    story.reports(0, [run("xy")])
    assert story.holders.drifted_blocks == 0, "a worker that begins says for the first time what it has"
    story.stores(1, run("abc"))
    story.reports(1, [run("abc"), run("xy")])
    assert story.holders.drifted_blocks == 0
    story.reports(1, [run("ab"), run("xyz")])
    assert story.holders.drifted_blocks == 2
    assert [story.matched(names) for names in ("abc", "xyz")] == [2, 3]
    story.stores(3, run("pq"))
    story.reports(3, [run("pq")])
    assert story.holders.drifted_blocks == 2, "after a gap nobody believed to know"


def test_half_a_report_counts_for_nothing(story: HoldersStory) -> None:
    story.stores(1, run("ab"))
    story.stores(3, run("xy"))
    story.tell(report(3, 2, 2, [run("abcd")]))
    assert story.holders.trust(W0) == "degraded", "its first part was dropped from the log"
    story.tell(report(3, 1, 2, [run("ab")]))
    assert story.holders.trust(W0) == "degraded", "its second part is yet to come"
    story.reports(3, [run("xy")], [run("abcd")])
    assert (story.holders.trust(W0), story.matched("abcd"), story.matched("xy")) == ("exact", 4, 2)


def test_workers_of_a_commit_are_of_the_incarnation_that_lives(story: HoldersStory) -> None:
    story.tell(registered(incarnation=2, epoch=1), committed("n0", 2, (8,)))
    coming = WorkerId("n0/2/0")
    story.stores(1, run("ab"), worker=coming, incarnation=1)
    assert story.matched("ab", coming) == 0
    story.stores(1, run("ab"), worker=coming, incarnation=2)
    assert (story.holders.trust(coming), story.matched("ab", coming)) == ("exact", 2)


def test_a_lost_node_holds_nothing_and_late_word_of_an_older_incarnation_takes_nothing(story: HoldersStory) -> None:
    story.stores(1, run("ab"))
    story.tell(NodeLost(node=N0, incarnation=1, reason="test"))
    assert story.matched("ab") == 0
    story.tell(registered(incarnation=2, epoch=1))
    story.stores(1, run("ab"), incarnation=2)
    story.tell(NodeDeclaredLost(node=N0, incarnation=1, silent_us=1))
    assert story.matched("ab") == 2


def test_a_commit_keeps_what_was_reconciled_for_its_epoch(story: HoldersStory) -> None:
    story.stores(1, run("abcd"))
    coming = WorkerId("n0/2/0")

    def reconciled(names: str) -> PlacementReconciled:
        return PlacementReconciled(node=N0, epoch=2, workers=(ReconciledWorker(worker=coming, retained=(run(names),)),))

    story.tell(reconciled("abcd"), EpochAborted(node=N0, epoch=2, step="reconciling", reason="test"))
    assert story.holders.reconciled == {}, "an aborted epoch leaves nothing behind"
    story.tell(reconciled("ab"), committed("n0", 2, (8,)))
    assert (story.matched("abcd", coming), story.matched("abcd", W0)) == (2, 0)
    assert set(story.holders.workers) == {coming}
    story.holders.check()


def test_nothing_is_known_of_an_unknown_worker(story: HoldersStory) -> None:
    unknown = WorkerId("n9/1/0")
    story.stores(1, run("ab"), worker=unknown)
    assert (story.holders.trust(unknown), story.matched("ab", unknown)) == ("blind", 0)


class Watching:
    """Keeps what it is told; must agree with what it is told about."""

    def __init__(self) -> None:
        self.pairs: set[tuple[WorkerId, BlockId]] = set()

    def held(self, worker: WorkerId, parent: BlockId | None, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            assert (worker, block) not in self.pairs
            assert parent is None or (worker, parent) in self.pairs
            self.pairs.add((worker, block))
            parent = block

    def dropped(self, worker: WorkerId, blocks: Sequence[BlockId]) -> None:
        self.pairs -= {(worker, block) for block in blocks}


NAMES = st.text("ab", min_size=1, max_size=6)
WORKERS = st.sampled_from([W0, W4])


class TruthfulAgents(RuleBasedStateMachine):
    """Two workers hold what they hold. Their events reach the fold, or are lost; it may know less, never more."""

    @initialize()
    def start(self) -> None:
        self.story = HoldersStory()
        self.watching = self.story.holders.watcher = Watching()
        self.truth: dict[WorkerId, set[str]] = {W0: set(), W4: set()}
        self.numbers = {W0: 0, W4: 0}
        self.complete = {W0: True, W4: True}
        self.requests = 0

    def number(self, worker: WorkerId) -> int:
        self.numbers[worker] += 1
        return self.numbers[worker]

    @rule(worker=WORKERS, names=NAMES, told=st.booleans())
    def prefill(self, worker: WorkerId, names: str, told: bool) -> None:
        """It stores the rest of a prompt whose beginning it has."""
        self.requests += 1
        self.story.receives(f"q{self.requests}", names)
        have = next(depth for depth in range(len(names), -1, -1) if depth == 0 or names[:depth] in self.truth[worker])
        if have == len(names):
            return
        self.truth[worker] |= {names[: depth + 1] for depth in range(have, len(names))}
        number = self.number(worker)
        if told:
            self.story.prefills(f"q{self.requests}", number, have, len(names) - have, worker)
        self.complete[worker] &= told
        self.story.tell(completed(f"q{self.requests}", worker, 1))

    @precondition(lambda self: any(self.truth.values()))
    @rule(worker=WORKERS, data=st.data(), told=st.booleans())
    def evict(self, worker: WorkerId, data: st.DataObject, told: bool) -> None:
        """A block goes with everything below it, children first."""
        if not self.truth[worker]:
            return
        top = data.draw(st.sampled_from(sorted(self.truth[worker])))
        gone = sorted((each for each in self.truth[worker] if each.startswith(top)), key=len, reverse=True)
        self.truth[worker] -= set(gone)
        number = self.number(worker)
        if told:
            ids = b"".join(path(each)[-1] for each in gone)
            self.story.tell(BlocksEvicted(worker=worker, incarnation=1, number=number, cause="pressure", block_ids=ids))
        self.complete[worker] &= told

    @rule(worker=WORKERS, parts=st.integers(1, 3))
    def report(self, worker: WorkerId, parts: int) -> None:
        runs = [run(each, below=len(each) - 1) for each in sorted(self.truth[worker], key=len)]
        size = -(-len(runs) // parts)
        self.story.reports(
            self.numbers[worker], *(runs[part * size : (part + 1) * size] for part in range(parts)), worker=worker
        )
        self.complete[worker] = True

    @invariant()
    def agrees(self) -> None:
        self.story.holders.check()
        index = self.story.holders.index
        held = {(worker, block) for worker in self.story.holders.workers for block, _ in index.held(worker)}
        assert held == self.watching.pairs
        for worker, truth in self.truth.items():
            true = {path(each)[-1] for each in truth}
            known = {block for holder, block in held if holder == worker}
            if self.complete[worker]:
                assert known == true
            if (
                self.story.holders.trust(worker) == "exact"
                and self.numbers[worker] == self.story.holders.workers[worker].number
            ):
                assert known == true, "exact means exact"

    @invariant()
    def matches_along_runs_are_matches_by_search(self) -> None:
        for worker in self.truth:
            for names in ("aaaaaa", "abab", "bbba", "babbab"):
                chain = path(names)
                held = {block for block, _ in self.story.holders.index.held(worker)}
                plain = next((depth for depth, block in enumerate(chain) if block not in held), len(chain))
                assert self.story.holders.matched(chain).get(worker, 0) == plain


TruthfulAgents.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTruthfulAgents = TruthfulAgents.TestCase


def test_a_chain_that_is_not_whole_is_not_known(story: HoldersStory) -> None:
    story.tell(RequestReceived(**{**received("q1", 1).model_dump(), "known_blocks": 1}))
    assert "q1" in story.holders.open
    assert "q1" not in story.holders.chains
