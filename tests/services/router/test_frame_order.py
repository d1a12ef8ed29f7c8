"""Whatever core NATS does to a stream of frames, every token stands once and in order, as far as there is no gap."""

from hypothesis import given
from hypothesis import strategies as st

from services.router.frames import HELD_FRAMES_MAX, WAITING_FRAMES_MAX, Broken, FrameOrder, Inbox
from shared.contracts.commands import TokenFrame, TokenLogprobs
from shared.contracts.ids import RequestId


def frame(index: int, tokens: list[int], attempt: int = 1, **more: object) -> TokenFrame:
    return TokenFrame.model_validate(
        {"request": RequestId("r"), "attempt": attempt, "index": index, "tokens": tokens, **more}
    )


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[TokenFrame], int]:
    """Frames cut anywhere, some lost, some doubled, in any order; and how many tokens there were."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=10))
    frames, at = [], 0
    for size in sizes:
        frames.append(frame(at, list(range(at, at + size))))
        at += size
    kept = [each for each in frames if draw(st.integers(0, 9))]
    doubled = draw(st.lists(st.sampled_from(frames), max_size=3))
    return draw(st.permutations(kept + doubled)), at


@given(deliveries())
def test_tokens_stand_once_and_in_order(delivered: tuple[list[TokenFrame], int]) -> None:
    frames, total = delivered
    order = FrameOrder(1)
    tokens = [token for each in frames for piece in order.take(each) for token in piece.tokens]
    known = {token for each in frames for token in each.tokens}
    reachable = next((token for token in range(total) if token not in known), total)
    assert tokens == list(range(reachable))
    assert order.tokens == reachable
    assert order.has_gap == bool(known - set(tokens))


def test_an_overlap_is_cut_with_its_logprobs() -> None:
    order = FrameOrder(1)
    order.take(frame(0, [0, 1]))
    logprobs = [TokenLogprobs(alternatives=((token, -1.0),)) for token in (1, 2)]
    [piece] = order.take(frame(1, [1, 2], logprobs=logprobs))
    assert (piece.tokens, piece.logprobs) == ((2,), (logprobs[1],))


def test_a_last_frame_without_tokens_ends_the_answer() -> None:
    order = FrameOrder(1)
    order.take(frame(0, [0]))
    [piece] = order.take(frame(1, [], finish="length"))
    assert (piece.tokens, piece.frame.finish) == ((), "length")


def test_other_attempts_are_fenced() -> None:
    assert FrameOrder(2).take(frame(0, [0], attempt=1)) == []


def test_what_is_held_is_bounded() -> None:
    order = FrameOrder(1)
    for index in range(1, 10 * HELD_FRAMES_MAX):
        order.take(frame(index, [index]))
    [first, *rest] = order.take(frame(0, [0]))
    assert (first.tokens, len(rest)) == ((0,), HELD_FRAMES_MAX)


async def test_an_inbox_drops_frames_but_no_signal() -> None:
    inbox = Inbox()
    assert all(inbox.put(frame(index, [0])) for index in range(WAITING_FRAMES_MAX))
    assert not inbox.put(frame(0, [0]))
    assert inbox.put(Broken(1, "node-lost"))
