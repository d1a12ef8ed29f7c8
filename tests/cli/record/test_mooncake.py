"""A recorded arrival as a row of a trace, by hand."""

import pytest

from cli.record.mooncake import NoTrace, Tracing
from services.ledger.arrivals import Arrived
from tests.support.story import received

A, B, C = (bytes([each]) * 16 for each in range(3))


def arrived(request: str, prompt_tokens: int, *blocks: bytes, ms: int = 0, output: int | None = None) -> Arrived:
    return Arrived(10**18 + ms * 10**6, received(request, prompt_tokens, block_ids=b"".join(blocks)), output)


def test_prompts_share_the_blocks_that_they_shared_and_no_partial_one() -> None:
    tracing = Tracing(4, b"salt")
    one, two, three = (
        tracing.row(arrived("one", 11, A, B, output=7)),
        tracing.row(arrived("two", 12, A, B, C, ms=250)),
        tracing.row(arrived("three", 11, A, B, ms=1_000)),
    )
    assert one.hash_ids[:2] == two.hash_ids[:2] == three.hash_ids[:2]
    assert len({*one.hash_ids, *two.hash_ids, *three.hash_ids}) == 5
    assert [each.arrival_ms for each in (one, two, three)] == [0, 250, 1_000]
    assert [each.output_tokens for each in (one, two, three)] == [7, 1, 1], "measured, else what it might have got"
    assert all(0 <= each < 2**63 for each in one.hash_ids)


def test_ids_of_two_files_cannot_be_joined() -> None:
    one, other = (Tracing(4, salt).row(arrived("one", 11, A, B)).hash_ids for salt in (b"salt", b"pepper"))
    assert not set(one) & set(other)


@pytest.mark.parametrize("prompt_tokens", [7, 16])
def test_blocks_of_another_size_are_refused(prompt_tokens: int) -> None:
    with pytest.raises(NoTrace, match=r"request one: 2 block ids for .* one per 4 tokens"):
        Tracing(4, b"salt").row(arrived("one", prompt_tokens, A, B))
