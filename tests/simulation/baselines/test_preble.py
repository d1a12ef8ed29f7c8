"""E2 against decisions computed by hand."""

from itertools import count

from shared.contracts.ids import RequestId, WorkerId
from simulation.baselines.preble import PrebleE2
from simulation.baselines.rule import Prompt
from tests.simulation.baselines.views import prompt, worker

A, B, C = (WorkerId(name) for name in "abc")
TWO = [worker("a"), worker("b")]


class Routed:
    """Places what it is asked to, as a router does."""

    def __init__(self) -> None:
        self.rule, self._numbers = PrebleE2(), count()

    def place(self, asked: Prompt, names: str = "ab") -> WorkerId:
        chosen = self.rule.choose(asked, [worker(name) for name in names])
        assert chosen is not None
        self.rule.placed(RequestId(str(next(self._numbers))), asked, chosen)
        return chosen


def test_new_prompts_spread_by_the_tokens_of_the_window() -> None:
    routed = Routed()
    # Loads: a 1,000 | b 400 | b 400 + 500 | b 900 + 300 | then a is the lighter.
    tokens = [1_000, 400, 500, 300, 100]
    assert [routed.place(prompt(each, salt)) for salt, each in enumerate(tokens)] == [A, B, B, B, A]


def test_a_prefix_of_more_than_half_is_exploited() -> None:
    routed = Routed()
    assert routed.place(prompt(1_000)) == A
    # 6 of 11 blocks are at a, whose load is the greater; 5 of 11 are not more than half: b with 1,100 < a with 1,500 + 600.
    assert routed.place(prompt(1_100, 1, shared=6)) == A
    assert routed.place(prompt(1_100, 2, shared=5)) == B


def test_exploring_counts_what_would_be_missed() -> None:
    routed = Routed()
    assert routed.place(prompt(1_000)) == A
    assert routed.place(prompt(600, 1)) == B
    # a: 1,000 + 1,100 - 500 = 1,600; b: 600 + 1,100 = 1,700.
    assert routed.place(prompt(1_100, 2, shared=5)) == A


def test_several_homes_share_a_prefix_and_the_lightest_serves_it() -> None:
    routed = Routed()
    routed.place(prompt(1_000))
    # b takes it for want of a; now both are homes, and each carries half of 1,000 + 1,000.
    assert routed.place(prompt(1_000), "b") == B
    assert routed.place(prompt(300, 1)) == A
    assert routed.place(prompt(1_000, 0)) == B


def test_after_the_window_nothing_is_known() -> None:
    routed = Routed()
    routed.place(prompt(1_000))
    routed.place(prompt(300, 1))
    # Within three minutes a is exploited; after it the loads are gone, and the first of equals gets the prompt.
    assert routed.place(prompt(1_000, at_s=180), "ba") == A
    assert routed.place(prompt(1_000, at_s=361), "ba") == B
    assert len(routed.rule._window) == 1
    assert len(routed.rule._of_block) == 10


def test_the_heaviest_gives_prefixes_to_the_lightest() -> None:
    routed = Routed()
    # Three prefixes at a, each of 33 requests: the first computes 1,000 tokens, the others the 100 that are always computed.
    for salt in (1, 2, 3):
        for _ in range(33):
            assert routed.place(prompt(1_000, salt), "a") == A
    assert routed.place(prompt(100, 4)) == B
    # With that a hundred were placed at two workers: a has 3 · 4,200 and b 100, so b gets the first prefix of 4,200. With
    # another one it would have more than a.
    assert [routed.place(prompt(1_000, salt)) for salt in (1, 2, 3)] == [B, A, A]
    assert routed.rule._loads == {A: 2 * 4_300, B: 4_400}
