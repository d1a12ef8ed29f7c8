"""SGLang's rule against decisions computed by hand, and what it remembers."""

from collections.abc import Sequence
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.ids import RequestId, WorkerId
from simulation.baselines.rule import Prompt, WorkerView
from simulation.baselines.sglang import CacheAware, SentPrefixes
from tests.simulation.baselines.views import prompt, worker

A, B, C = (WorkerId(name) for name in "abc")


class Routed:
    """Places what it is asked to, as a router does."""

    def __init__(self) -> None:
        self.rule, self._numbers = CacheAware(), count()

    def place(self, asked: Prompt, workers: Sequence[WorkerView]) -> WorkerId:
        chosen = self.rule.choose(asked, workers)
        assert chosen is not None
        self.rule.placed(RequestId(str(next(self._numbers))), asked, chosen)
        return chosen


def test_new_prompts_go_to_the_fewest_requests_and_known_ones_back() -> None:
    routed = Routed()
    assert routed.place(prompt(1_000), [worker("a", running=1), worker("b"), worker("c")]) == B
    # 4 of 10 blocks are known, 40 % > 30 %: back to b, though it is busier. 3 of 10 are not enough.
    assert routed.place(prompt(1_000, 1, shared=4), [worker("a"), worker("b", running=60)]) == B
    assert routed.place(prompt(1_000, 2, shared=3), [worker("a"), worker("b", running=60)]) == A
    # Half a block more and 4 of 13.4 blocks are less than 30 %.
    assert routed.place(prompt(1_340, 3, shared=4), [worker("a"), worker("b", running=60)]) == A


def test_everybody_idle_is_the_first() -> None:
    """The pinning of sgl-project/sglang issue 32983: at one request at a time, all of them are learned on one worker."""
    routed = Routed()
    idle = [worker("a"), worker("b"), worker("c")]
    assert {routed.place(prompt(1_000, salt), idle) for salt in range(20)} == {A}


def test_an_unbalanced_pool_forgets_affinity_by_both_bounds() -> None:
    routed = Routed()
    routed.place(prompt(1_000), [worker("a")])
    known = prompt(1_000)
    assert routed.rule.choose(known, [worker("a", running=64), worker("b")]) == A
    assert routed.rule.choose(known, [worker("a", running=65), worker("b")]) == B
    # 65 more are too few of a hundred and thirty: 195 is not above 1.5 · 130.
    assert routed.rule.choose(known, [worker("a", running=195), worker("b", running=130)]) == A
    assert routed.rule.choose(known, [worker("a", running=196), worker("b", running=130)]) == B


def test_a_block_belongs_to_whom_it_was_first_sent() -> None:
    routed = Routed()
    routed.place(prompt(1_000), [worker("a")])
    # Unbalanced: the same prompt goes to b, which has it from now on too.
    assert routed.place(prompt(1_000), [worker("a", running=99), worker("b")]) == B
    assert routed.rule.choose(prompt(1_000), [worker("b"), worker("a")]) == A
    # With a gone it is b's.
    assert routed.rule.choose(prompt(1_000), [worker("c"), worker("b", running=9)]) == B
    assert routed.rule.choose(prompt(1_000), [worker("c"), worker("a", running=9)]) == C


def test_the_least_recently_sent_is_forgotten_from_the_end() -> None:
    sent = SentPrefixes(tokens_max=1_000)
    sent.send(prompt(600), A)
    sent.send(prompt(700, 1, shared=2), A)
    # 2 + 4 + 5 blocks are one too many: the last of the first prompt goes.
    assert sent.match(prompt(600).chain) == (5, A)
    assert sent.match(prompt(700, 1, shared=2).chain) == (7, A)
    # Nothing is forgotten of one worker because another is full.
    sent.send(prompt(900, 2), B)
    assert sent.match(prompt(600).chain) == (5, A)


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 3), st.sampled_from([A, B, C])), max_size=20))
def test_what_is_remembered_is_bounded_and_begins_at_the_beginning(sends: list[tuple[int, int, WorkerId]]) -> None:
    sent = SentPrefixes(tokens_max=800)
    held: dict[WorkerId, set[bytes]] = {}
    for tokens, salt, to in sends:
        asked = prompt(tokens, salt, shared=min(1, tokens // 100))
        sent.send(asked, to)
        held.setdefault(to, set()).update(asked.chain)
        known, owner = sent.match(asked.chain)
        assert known == len(asked.chain)
        assert owner is None or set(asked.chain) <= held[owner]
    blocks = sum(len(each) for each in sent._of_worker.values())
    assert blocks <= 8 * 3
    assert blocks == sum(len(each) for each in sent._of_block.values())
