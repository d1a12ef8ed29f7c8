"""The decode side of the modelled engine: hand-offs take what their bytes would, and tokens come at the node's pace.

What stands for a prompt's KV is the hash of what was said (`modelled_text`): a few bytes, which `offer` puts behind the node's
access, so that another node's decode rank goes on where the prefill ended.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import NamedTuple

from services.worker.engine.copy_plan import HandOffPlan
from services.worker.engine.modelled_text import Said
from services.worker.engine.protocol import EngineError, HandedOff, Sampling, Token
from shared.contracts.ids import RequestId
from shared.model.blocks import Tokens

DECODE_TICK_S = 0.01
"""Decode sleeps at least this long and then yields every token that is due: a timer per token and sequence would keep a
processor busy when modelled time runs fast."""

DECODE_SEQUENCES = 1_024
"""Of a rank: as many as an agent streams, so that nothing ever waits for room that is not modelled."""


class Prefilled(NamedTuple):
    """What a finished prefill leaves for the decode side."""

    prompt_tokens: int
    context: Said


class ModelledDecode:
    """`token_bytes` move at `bytes_per_s`, and a token takes `tpot_s`, in seconds of the clock. `sleep` raises EngineDied
    when the node dies meanwhile."""

    def __init__(
        self,
        ranks: int,
        vocabulary: int,
        access: bytes,
        token_bytes: int,
        bytes_per_s: float,
        tpot_s: float,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._ranks, self._vocabulary, self._access, self._sleep = ranks, vocabulary, access, sleep
        self._token_bytes, self._bytes_per_s, self._tpot_s = token_bytes, bytes_per_s, tpot_s
        self._prefilled: dict[RequestId, Prefilled] = {}
        self._handed_off: dict[RequestId, Said] = {}

    def prefilled(self, request: RequestId, tokens: Tokens, sampling: Sampling) -> Token:
        """A prompt is done: its first token."""
        context = Said.of(tokens)
        self._prefilled[request] = Prefilled(len(tokens), context)
        return context.next(sampling, self._vocabulary)

    def release(self, request: RequestId) -> None:
        self._prefilled.pop(request, None)

    def end(self, request: RequestId) -> None:
        """Unknown requests are ignored."""
        self._handed_off.pop(request, None)

    def access(self, request: RequestId) -> bytes | None:
        """How another node reads its KV; None if it has no finished prefill."""
        prefilled = self._prefilled.get(request)
        return None if prefilled is None else b"%s#%d" % (self._access, prefilled.context.said)

    async def hand_off(self, request: RequestId, plan: HandOffPlan | None) -> HandedOff:
        """See `Engine.hand_off`."""
        if not self._ranks:
            raise EngineError("hand_off: this node has no decode ranks")
        prefilled = self._prefilled.get(request) if plan is None else self._offered(request, plan)
        if prefilled is None:
            raise EngineError(f"hand_off: request {request} has no finished prefill here")
        size = prefilled.prompt_tokens * self._token_bytes
        seconds = size / self._bytes_per_s
        if request not in self._handed_off:
            limit_s = seconds if plan is None else plan.limit_s
            await self._sleep(min(seconds, limit_s))
            if seconds > limit_s:
                raise EngineError(f"hand_off: request {request}: not done within {limit_s:g} s")
            self._handed_off[request] = prefilled.context.copy()
        return HandedOff(request, size, seconds)

    def _offered(self, request: RequestId, plan: HandOffPlan) -> Prefilled:
        """What another node has said that it lends."""
        for access in plan.access.values():
            ours, _, said = access.rpartition(b"#")
            if ours == self._access:
                return Prefilled(plan.prompt_tokens, Said(int(said)))
        raise EngineError(f"hand_off: request {request}: its KV is of another model, or cannot be read")

    async def decode(
        self, request: RequestId, first_token: int, max_new_tokens: int, stop_tokens: frozenset[int], sampling: Sampling
    ) -> AsyncGenerator[Token, None]:
        """See `Engine.decode`."""
        context = self._handed_off.get(request)
        if context is None:
            raise EngineError(f"decode: request {request} was not handed off")
        due = max(1, round(DECODE_TICK_S / self._tpot_s))
        context.say(first_token)
        try:
            for index in range(max_new_tokens):
                if index % due == 0:
                    await self._sleep(self._tpot_s * min(due, max_new_tokens - index))
                token = context.next(sampling, self._vocabulary)
                context.say(token.token)
                yield token
                if token.token in stop_tokens:
                    return
        finally:
            self.end(request)
