"""The trie against a brute-force one that keeps every pair and decays all of them at every scan."""

from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.cachemgr import trie as trie_module
from services.cachemgr.first_tips import FirstTips
from services.cachemgr.reclaiming import coldest
from services.cachemgr.trie import COLD, Trie
from shared.contracts.ids import BlockId, WorkerId
from shared.model.holders import Held, Holders, _add, _clear, _dropped
from shared.model.lattice import DEGREES
from shared.model.parameters import Parameters, changed

WORKERS = {WorkerId(f"n/1/{i}"): degree for i, degree in enumerate((1, 1, 2, 4))}
PATHS = [
    tuple(BlockId(f"{path[: i + 1]:>16}".encode()) for i in range(len(path))) for path in ("abcd", "abxy", "pq", "r")
]
workers, paths, depths = st.sampled_from(list(WORKERS)), st.sampled_from(PATHS), st.integers(1, 4)


def remove(holders: Holders, worker: WorkerId, blocks: Sequence[BlockId]) -> None:
    _dropped(holders, worker, holders.index.remove(worker, blocks))


class TrieAgainstBruteForce(RuleBasedStateMachine):
    """The model: a dict of (z, C) to each statistic, and holders as sets."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters = Parameters()
        self.trie = Trie(self.parameters, FirstTips())
        self.trie.degrees = dict(WORKERS)
        self.holders = Holders(workers={worker: Held(1) for worker in WORKERS}, watcher=self.trie)
        self.access: dict[tuple[BlockId, int], float] = defaultdict(float)
        self.missed: dict[tuple[BlockId, int], float] = defaultdict(float)
        self.known: set[BlockId] = set()

    @rule(worker=workers, path=paths, depth=depths)
    def store(self, worker, path, depth) -> None:
        _add(self.holders, worker, self.holders.workers[worker], None, path[:depth])
        self.known |= self.holders.index.index.keys()

    @rule(worker=workers, path=paths, depth=depths)
    def evict(self, worker, path, depth) -> None:
        below = [block for each in PATHS if each[:depth] == path[:depth] for block in each[depth - 1 :]]
        remove(self.holders, worker, sorted(dict.fromkeys(below), key=lambda block: -len(block.strip())))
        self.trie.trim()

    @rule(worker=workers)
    def lose(self, worker) -> None:
        _clear(self.holders, worker)
        self.trie.trim()

    @rule(path=paths, depth=depths, degree=st.sampled_from(DEGREES))
    def access_path(self, path, depth, degree) -> None:
        for block in path[:depth]:
            if node := self.trie.nodes.get(block):
                self.trie.accessed(node, degree)
                self.access[block, degree] += 1

    @rule(path=paths, degree=st.sampled_from(DEGREES), benefit_s=st.sampled_from([0.0, 0.01, 0.2, 5.0]))
    def miss_path(self, path, degree, benefit_s) -> None:
        for block in path:
            if node := self.trie.nodes.get(block):
                self.trie.missed(node, degree, benefit_s)
                self.missed[block, degree] += benefit_s

    @rule(path=paths, depth=depths, degree=st.sampled_from(DEGREES), share=st.sampled_from([0.5, 0.01]))
    def relieve_path(self, path, depth, degree, share) -> None:
        for block in path[:depth]:
            if node := self.trie.nodes.get(block):
                self.trie.relieved(node, degree, share)
                self.missed[block, degree] *= share

    @rule(nodes=st.integers(0, 9), spare=st.booleans())
    def pass_over(self, nodes, spare) -> None:
        self.trie.tips.passed(nodes, spare=spare)

    @rule(times=st.sampled_from([1, 2, 4, 80]))
    def scan(self, times) -> None:
        for _ in range(times):
            self.trie.scanned(self.trie.scan + 1)
            for statistic in (self.access, self.missed):
                for pair in statistic:
                    statistic[pair] *= self.parameters.decay

    @rule(
        changes=st.fixed_dictionaries(
            {
                "decay": st.sampled_from([0.1, 0.8, 0.99]),
                "theta_inter": st.sampled_from([0.001, 0.3, 4.0]),
                "theta_intra": st.sampled_from([1.0, 2.0]),
                "theta_reclaim": st.sampled_from([0.001, 0.3]),
            }
        )
    )
    def retune(self, changes) -> None:
        self.parameters = changed(self.parameters, changes)
        self.trie.retune(self.parameters)

    @invariant()
    def statistics_agree(self) -> None:
        for block, node in self.trie.nodes.items():
            access, missed = self.trie.demand(node)
            for index, degree in enumerate(DEGREES):
                assert access[index] == pytest.approx(self.access[block, degree], rel=1e-9, abs=2 * COLD)
                assert missed[index] == pytest.approx(self.missed[block, degree], rel=1e-9, abs=2 * COLD)

    @invariant()
    def candidates_agree(self) -> None:
        inter, intra, reclaim = set(), set(), 0
        for block in self.known:
            for degree in DEGREES:
                r = sum(WORKERS[worker] == degree for worker in self.holders.index.holders(block))
                access, missed = self.access[block, degree], self.missed[block, degree]
                if r == 0 and missed > self.parameters.theta_inter:
                    inter.add((block, degree))
                if r > 0 and access > r * self.parameters.theta_intra:
                    intra.add((block, degree))
                reclaim += r > 0 and access < r * self.parameters.theta_reclaim
        found = self.trie.candidates()
        if not self._on_an_edge():
            assert {(each.node.block, each.degree) for each in found.inter} == inter
            assert {(each.node.block, each.degree) for each in found.intra} == intra
            assert found.reclaimable == reclaim

    @invariant()
    def the_coldest_ends_are_found(self) -> None:
        """Whatever the line's order is."""
        held = {worker: dict(self.holders.index.held(worker)) for worker in WORKERS}
        ends = {(b, WORKERS[w]) for w, parents in held.items() for b in parents.keys() - set(parents.values())}
        expected = []
        for block, degree in ends:
            replicas = sum(WORKERS[worker] == degree for worker in self.holders.index.holders(block))
            if self.access[block, degree] < replicas * self.parameters.theta_reclaim:
                expected.append(self.access[block, degree] / replicas)
        for limit in (0, 1, 3, 100):
            found = coldest(self.trie, limit, lambda candidate: True, spare=False).candidates
            if not self._on_an_edge():
                assert [each.score for each in found] == pytest.approx(sorted(expected)[:limit], rel=1e-9, abs=2 * COLD)
            assert {(each.node.block, each.degree) for each in found} <= ends

    def _on_an_edge(self) -> bool:
        """Whether rounding may decide a comparison."""
        p = self.parameters
        edges = [p.theta_inter, *(r * theta for r in (1, 2) for theta in (p.theta_intra, p.theta_reclaim))]
        values = [*self.access.values(), *self.missed.values()]
        return any(abs(value - edge) < 1e-9 for value in values for edge in edges)

    @invariant()
    def matches_agree(self) -> None:
        for path in PATHS:
            for degree in (None, *DEGREES):
                held = [
                    any(degree in (None, WORKERS[worker]) for worker in self.holders.index.holders(block))
                    for block in path
                ]
                expected = next((i for i, there in enumerate(held) if not there), len(path))
                assert self.trie.matched(path, degree) == expected

    @invariant()
    def the_structures_are_sound(self) -> None:
        self.holders.check()
        self.trie.check(self.holders)


TrieAgainstBruteForce.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTrieAgainstBruteForce = TrieAgainstBruteForce.TestCase


def small_trie() -> tuple[Trie, Holders]:
    trie = Trie(Parameters())
    trie.degrees = dict(WORKERS)
    return trie, Holders(workers={worker: Held(1) for worker in WORKERS}, watcher=trie)


def test_nodes_without_holders_are_bounded_and_go_oldest_first_with_all_below(monkeypatch) -> None:
    monkeypatch.setattr(trie_module, "HOLDERLESS_MAX", 3)
    trie, holders = small_trie()
    worker = next(iter(WORKERS))
    for path in PATHS:
        _add(holders, worker, holders.workers[worker], None, path)
    remove(holders, worker, [*reversed(PATHS[1][2:]), *reversed(PATHS[0][2:])])
    assert len(trie.nodes) == 9
    trie.trim()
    assert PATHS[1][3] not in trie.nodes, "the oldest"
    assert {PATHS[0][2], PATHS[0][3], PATHS[1][2]} <= trie.nodes.keys()
    _clear(holders, worker)
    trie.trim()
    trie.check(holders)
    assert len(trie.nodes) <= 3


def test_the_hottest_are_found_among_the_last_demanded(monkeypatch) -> None:
    monkeypatch.setattr(trie_module, "RECENT_MAX", 2)
    trie, holders = small_trie()
    worker = next(iter(WORKERS))
    for path in PATHS:
        _add(holders, worker, holders.workers[worker], None, path)
    first, second, third = (trie.nodes[path[0]] for path in (PATHS[0], PATHS[2], PATHS[3]))
    for _ in range(9):
        trie.accessed(first, 1)
    trie.accessed(second, 1)
    trie.missed(third, 4, 1.0)
    trie.missed(second, 4, 2.0)
    assert [node for node, _ in trie.hottest(5)] == [second, third]
    assert [node for node, _ in trie.hottest(1)] == [second]
    fourth = trie.nodes[PATHS[1][3]]
    trie.accessed(fourth, 1)
    assert {node.block for node, _ in trie.hottest(5)} == {second.block, fourth.block}, "third is older"


def test_a_relieved_node_is_hot_only_while_something_else_makes_it_so() -> None:
    trie, holders = small_trie()
    worker = next(iter(WORKERS))
    _add(holders, worker, holders.workers[worker], None, PATHS[0])
    cooling, reused = (trie.nodes[block] for block in PATHS[0][:2])
    theta = Parameters().theta_inter
    for node in (cooling, reused):
        trie.missed(node, 4, 3 * theta)
    trie.accessed(reused, 1)
    trie.scanned(1)
    trie.relieved(cooling, 4, 0.5)
    trie.check(holders)
    assert {each.node for each in trie.candidates().inter} == {cooling, reused}, "half of it is enough"
    trie.relieved(cooling, 4, 0.5)
    trie.relieved(reused, 4, 0.1)
    trie.check(holders)
    assert not trie.candidates().inter
    assert set(trie._hot) == {reused.block}
    trie.missed(cooling, 4, theta)
    trie.check(holders)
    assert {each.node for each in trie.candidates().inter} == {cooling}, "it comes back"


def test_check_finds_a_wrong_count() -> None:
    trie, holders = small_trie()
    worker = next(iter(WORKERS))
    _add(holders, worker, holders.workers[worker], None, PATHS[0])
    trie.check(holders)
    trie.nodes[PATHS[0][1]].replicas = (7, 0, 0, 0)
    with pytest.raises(AssertionError, match="replicas are counted"):
        trie.check(holders)
