"""Token ids as text, piece by piece: never half a character, never a part of a stop string."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no UTF-8: here mostly a character whose last bytes are still to come."""

PENDING_TOKENS_MAX = 4
"""No UTF-8 character has more bytes; behind that many tokens a broken one stays broken and is shown as it is."""

Decode = Callable[[Sequence[int]], str]


class TextStream(Protocol):
    """The text of one answer."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that has become certain."""

    def flush(self) -> str:
        """The rest, at the end of the answer."""


class DecodedStream:
    """Text out of a tokenizer's `decode`, which looks at neighbours: a token is decoded behind those before it, and the
    difference is its text. `context` is the end of the prompt."""

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._shown = list(context)
        self._pending: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        return "".join(self._push(token) for token in tokens)

    def flush(self) -> str:
        return self._show()

    def _push(self, token: int) -> str:
        self._pending.append(token)
        if self._difference().endswith(REPLACEMENT) and len(self._pending) < PENDING_TOKENS_MAX:
            return ""
        return self._show()

    def _show(self) -> str:
        text = self._difference()
        self._shown, self._pending = self._pending or self._shown, []
        return text

    def _difference(self) -> str:
        return self._decode(self._shown + self._pending)[len(self._decode(self._shown)) :]


class IdStream:
    """The answer of a pool without a tokenizer: every token id as `<id> `, so that a client can read them back."""

    def push(self, tokens: Sequence[int]) -> str:
        return "".join(f"<{token}> " for token in tokens)

    def flush(self) -> str:
        return ""


class Cut(NamedTuple):
    """Text that may be shown, and whether a stop string came right behind it."""

    text: str
    stopped: bool


class StopCutter:
    """Ends a text before the first stop string in it, or behind it if that is `shown`. Holds back what may be the beginning of
    one."""

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        self._stops = tuple(stops)
        self._shown = shown
        self._held = ""

    def push(self, text: str) -> Cut:
        """Nothing may be pushed behind a stop."""
        text = self._held + text
        found = min(((at, len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            self._held = ""
            return Cut(text[: sum(found) if self._shown else found[0]], True)
        held = self._beginning_of_a_stop(text)
        self._held = text[len(text) - held :]
        return Cut(text[: len(text) - held], False)

    def flush(self) -> str:
        """What was held back and has turned out to be no stop."""
        held, self._held = self._held, ""
        return held

    def _beginning_of_a_stop(self, text: str) -> int:
        """How many last characters of `text` begin a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        return next(
            (
                size
                for size in range(min(longest, len(text)), 0, -1)
                if any(stop.startswith(text[-size:]) for stop in self._stops)
            ),
            0,
        )
