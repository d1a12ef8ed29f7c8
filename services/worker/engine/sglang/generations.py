"""Requests under way at SGLang servers: one prefill each, and the tokens that follow it where something decodes.

SGLang takes a request once, with everything that it is to generate. So what decode will ask for later is asked for here, and
its tokens wait until they are: at most `new_tokens_max` of them.

    one server         the stream of one request: its first part ends the prefill
    prefill + decode   both are asked at the same time, with a room number that is theirs alone; the prefill server answers with
                       the first token when the KV has gone over, and the decode server streams that token and all others.
                       So also what nobody decodes, such as a chunk: of a request without a decode server
                       (`FAKE_BOOTSTRAP_HOST`) a prefill server keeps no page
"""

import asyncio
import random
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any

from services.worker.engine.protocol import EngineError, PrefillItem, Token
from services.worker.engine.sglang.fleet import Fleet, Place
from services.worker.engine.sglang.generation import ROOMS, Answers, Pairing, Part, body, room_for
from services.worker.engine.sglang.server import Server, ServerLost
from services.worker.engine.sglang.settings import SglangSettings
from services.worker.engine.sglang.unit_cache import UnitCache
from shared.model.lattice import Group

ABORTED = "abort"


class TokenStream:
    """What one server streams for one request, taken in as it comes. `stop` when nobody wants more, `fail` when nothing more
    can come."""

    def __init__(self, server: Server, rid: str, asked: dict[str, Any], incremental: bool) -> None:
        self._server, self._rid = server, rid
        self._answers = Answers(incremental)
        self._first: asyncio.Future[Part] = asyncio.get_running_loop().create_future()
        self._tokens: asyncio.Queue[Token | None] = asyncio.Queue()
        self._error: EngineError | None = None
        self._task = asyncio.create_task(self._pump(asked))
        self._task.add_done_callback(self._over)

    async def _pump(self, asked: dict[str, Any]) -> None:
        async for answer in self._server.stream(asked):
            self._take(self._answers.read(answer))
        if not self._first.done():
            raise EngineError(f"{self._server.url}: {self._rid} ended without a token")
        self._tokens.put_nowait(None)

    def _over(self, task: asyncio.Task[None]) -> None:
        """Whatever has ended it: who waits for a token would wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}"))

    def _take(self, part: Part) -> None:
        if part.finish == ABORTED:
            raise EngineError(f"{self._server.url}: {self._rid} was aborted: {part.detail}")
        first = bool(part.tokens) and not self._first.done()
        for token in part.tokens[first:]:
            self._tokens.put_nowait(token)
        if first:
            self._first.set_result(part)

    def fail(self, error: EngineError) -> None:
        """Whoever waits for a token, or will, is told."""
        self._error = self._error or error
        self._task.cancel()
        if not self._first.done():
            self._first.set_exception(error)
            # It is no fault if nobody has asked yet.
            self._first.exception()
        self._tokens.put_nowait(None)

    async def first(self) -> Part:
        """The part with the first token. Errors: EngineError, ServerLost."""
        return await asyncio.shield(self._first)

    async def tokens(self) -> AsyncGenerator[Token, None]:
        """The tokens after the first one, once. Errors: EngineError, ServerLost after the last that came."""
        while (token := await self._tokens.get()) is not None:
            yield token
        if self._error is not None:
            raise self._error

    async def stop(self) -> None:
        """Take in no more, and let the server know if it has not ended. Who waits for a token is told. Safe to repeat."""
        running = not self._task.done()
        self.fail(EngineError(f"{self._rid} was cancelled"))
        if running:
            await abort(self._server, self._rid)


class Generation:
    """One item of a step. `stream` has what follows the first token, None if nothing does; `decode_rank` is where from, None if
    it is the prefill's own server. `decoding` is what a decode server streams, wanted or not. `task` ends with the prefill."""

    def __init__(self, item: PrefillItem, place: Place, cache: UnitCache, pages: list[int]) -> None:
        self.item, self.place, self.cache, self.pages = item, place, cache, pages
        self.watcher = cache.watch()
        self.rid = ""
        self.stream: TokenStream | None = None
        self.decode_rank: int | None = None
        self.decoding: TokenStream | None = None
        self.task: asyncio.Task[Part]

    @property
    def end_tokens(self) -> int:
        """How far the share goes."""
        return len(self.item.tokens) if self.item.until is None else self.item.until


class Generations:
    """`chance` draws room numbers, and decode servers for what nobody decodes."""

    def __init__(self, fleet: Fleet, settings: SglangSettings, chance: random.Random) -> None:
        self._fleet, self._settings, self._chance = fleet, settings, chance
        self._numbers = count(1)
        # Two lives of an agent may talk to one server, and their requests must not be taken for each other.
        self._life = f"{chance.randrange(2**32):08x}"

    def begin(self, item: PrefillItem, group: Group, pages: list[int]) -> Generation:
        """Send it. The caller awaits `task`, and calls `end` if it does not want the answer."""
        generation = Generation(item, self._fleet.place(group), self._fleet.units[group.first_rank], pages)
        # SGLang aborts every request whose name begins with the one it is told: the end keeps 1 from ending 10.
        generation.rid = f"{item.request}-{self._life}-{next(self._numbers)}."
        generation.task = asyncio.create_task(self._run(generation))
        return generation

    def end(self, generation: Generation) -> None:
        """Nobody wants it any more, whatever it does."""
        generation.cache.unwatch(generation.watcher)
        running = not generation.task.done()
        generation.task.cancel()
        if running:
            self._fleet.spawn(abort(generation.place.server, generation.rid))
        if generation.stream is not None:
            self._fleet.spawn(generation.stream.stop())

    async def _run(self, generation: Generation) -> Part:
        """Errors: ServerLost if the prefill server is gone; EngineError for what SGLang refuses, or a decode server fails."""
        item = generation.item
        if self._settings.disaggregated:
            return await self._disaggregated(generation)
        asked = body(item, generation.rid, generation.place.unit, None)
        if asked["stream"]:
            generation.stream = self._stream(generation.place.server, generation.rid, asked)
            return await generation.stream.first()
        return await self._whole(generation, asked)

    async def _whole(self, generation: Generation, asked: dict[str, Any]) -> Part:
        server = generation.place.server
        part = Answers(incremental=False).read(await server.generate(asked))
        if part.finish == ABORTED or not part.tokens:
            raise EngineError(f"{server.url}: {generation.rid} was aborted: {part.detail}")
        return part

    async def _disaggregated(self, generation: Generation) -> Part:
        item, place = generation.item, generation.place
        drawn = room_for(self._chance.randrange(ROOMS), place.unit, self._settings.units)
        then = item.then if item.until is None else None
        wanted = self._chance.randrange(len(self._fleet.decode)) if then is None else then.decode_rank
        rank = self._decode_rank(wanted)
        pairing = Pairing(*self._bootstrap(place.server), drawn)
        asked = body(item, generation.rid, None, pairing) | {"stream": True}
        decode = self._stream(self._fleet.decode[rank], generation.rid, asked)
        generation.decode_rank, generation.decoding = rank, decode
        if then is not None:
            generation.stream = decode
        prefill = asyncio.create_task(
            self._whole(generation, body(item, generation.rid, place.unit, pairing) | {"stream": False})
        )
        failing = asyncio.create_task(self._decode_fails(decode, rank))
        try:
            await asyncio.wait((prefill, failing), return_when=asyncio.FIRST_COMPLETED)
            if failing.done() and not prefill.done() and (error := failing.result()) is not None:
                # Whoever ends the generation finds its task done, and would leave the prefill waiting for its room.
                self._fleet.spawn(abort(place.server, generation.rid))
                raise error
            return await prefill
        finally:
            prefill.cancel()
            failing.cancel()
            if then is None:
                self._fleet.spawn(decode.stop())

    async def _decode_fails(self, decode: TokenStream, rank: int) -> EngineError | None:
        """Why there will be no token, as soon as that is known; None once there is one."""
        try:
            await decode.first()
        except ServerLost as error:
            self._fleet.lose_decode(rank, str(error))
            return EngineError(str(error))
        except EngineError as error:
            return error
        return None

    def _decode_rank(self, wanted: int) -> int:
        """The one that the router chose, or, while that does not answer, the next that does. If none does, the first may only
        be late, and nobody is better."""
        ranks = len(self._fleet.decode)
        in_turn = [(wanted + offset) % ranks for offset in range(ranks)]
        return next((rank for rank in in_turn if not self._fleet.down[rank]), in_turn[0])

    def _bootstrap(self, server: Server) -> tuple[str, int]:
        """Where decode servers meet a prefill server, with its life as the address's user name, which no server asks for.

        SGLang 0.5.23 keeps what it knows of a prefill server by this address (`disaggregation/common/conn.py`:
        `prefill_info_table`, and the ports of its ranks in `connection_pool`), and forgets it after two failed heartbeats in a
        row, five seconds apart, or 300 s after a request that got nothing; not when a request is aborted. A server that is back
        sooner than two heartbeats would be written to at the ports of its dead ranks. Under another address nothing is known.
        """
        address = self._settings.servers[self._fleet.servers.index(server)]
        assert address.bootstrap_port is not None, "the settings have checked it"
        return f"{self._fleet.facts[server].life}@{address.host}", address.bootstrap_port

    def _stream(self, server: Server, rid: str, asked: dict[str, Any]) -> TokenStream:
        return TokenStream(server, rid, asked, self._fleet.facts[server].incremental_streaming_output)


async def abort(server: Server, rid: str) -> None:
    """A server that is gone has nothing to abort, and its watch will say so."""
    try:
        await server.abort(rid)
    except EngineError:
        return
