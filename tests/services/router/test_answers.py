"""An answer in parts, read off a request in memory."""

from collections.abc import Sequence
from pathlib import Path

from router_front import Agent, front

from services.router.answers import read


class Late:
    """Shows all of its text at the end, as a tokenizer does whose first bytes are half a character."""

    def __init__(self) -> None:
        self._tokens = 0

    def push(self, tokens: Sequence[int]) -> str:
        self._tokens += len(tokens)
        return ""

    def flush(self) -> str:
        return f"{self._tokens} tokens"


async def test_the_first_part_comes_with_the_first_token_even_without_text(tmp_path: Path) -> None:
    async with front(tmp_path) as router:
        await Agent(router, "n0").start((4,))
        parts = [part async for part in read(await router.submit([11, 12], 3), Late(), ())]
        assert [(part.text, len(part.tokens), part.finish) for part in parts] == [
            ("", 1, None),
            ("3 tokens", 2, "length"),
        ]
