"""One rank as the frontend sees it: a process, the commands it has yet to answer, and whether it is at work on them."""

import asyncio
import os
import signal
import socket
from collections.abc import Sequence, Set
from typing import Protocol, TypeVar

from services.worker.engine.protocol import EngineDied, EngineError
from services.worker.engine.torch.activity import Activity
from services.worker.engine.torch.messages import (
    Command,
    Decode,
    Decoded,
    End,
    Failed,
    Loading,
    Refused,
    Reply,
    frame,
    read,
)
from services.worker.engine.torch.zygote import Zygote

TokenStream = asyncio.Queue[Decoded | EngineError]
"""Ends with `last` or an error. Holds at most one request's new tokens, which the context length bounds."""

LISTEN_ON_S = 0.1
"""After a rank has said that it failed: a peer that was killed says nothing, and its end is why."""

_Wait = TypeVar("_Wait")


class Watcher(Protocol):
    """Who looks after all ranks."""

    def lose(self, reason: str) -> None:
        """The process has ended, or has said that it failed or something that it must not say."""

    def note(self, rank: int, progress: Loading) -> None:
        """It gets on with reading the weights."""


class RankProcess:
    """Made by `spawn`."""

    def __init__(self, rank: int, pid: int, pidfd: int, watcher: Watcher) -> None:
        self.rank, self.pid, self.pidfd = rank, pid, pidfd
        self._watcher = watcher
        self._answers: dict[int, asyncio.Future[Reply]] = {}
        self._streams: dict[int, TokenStream] = {}
        self._heard_s = 0.0
        self._activity = Activity(pid)
        self._still_looks = 0
        self._failed: str | None = None
        self._has_said_why = False
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(cls, zygote: Zygote, rank: int, files: Sequence[int], watcher: Watcher) -> "RankProcess":
        """Fork the process. Errors: EngineError if the zygote cannot."""
        ours, theirs = socket.socketpair()
        try:
            pid, pidfd = await asyncio.to_thread(zygote.spawn, theirs, files)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        process = cls(rank, pid, pidfd, watcher)
        reader, process._writer = await asyncio.open_unix_connection(sock=ours)
        process._listener = asyncio.create_task(process._listen(reader))
        process._listener.add_done_callback(process._stopped_listening)
        return process

    def ask(self, command: Command) -> asyncio.Future[Reply]:
        """Send a command that has one answer. The future fails with EngineError on a refusal, also of one that is too large to
        be sent, and with EngineDied on a loss."""
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        try:
            self._begin(command, self._answers, answer)
        except EngineError as error:
            answer.set_exception(error)
        return answer

    def stream(self, command: Decode) -> TokenStream:
        """Start a sequence's tokens. `end` it when they are no longer wanted."""
        tokens = TokenStream()
        try:
            self._begin(command, self._streams, tokens)
        except EngineError as error:
            tokens.put_nowait(error)
        return tokens

    @property
    def failed(self) -> str | None:
        """Why nobody needs to ask it any more; None while it is well."""
        return self._failed

    def tell(self, command: Command) -> None:
        """Send a command whose answer nobody waits for."""
        self._send(frame(command))

    def end(self, command: End, stream: int | None) -> asyncio.Future[Reply]:
        """End a sequence and forget its stream, if it has one; what still comes of it is dropped. The answer says that its
        memory is free."""
        if stream is not None:
            self._streams.pop(stream, None)
        return self.ask(command)

    @property
    def owed(self) -> Set[int]:
        """The numbers of the commands that it has yet to answer to the end."""
        return self._answers.keys() | self._streams.keys()

    @property
    def stopped(self) -> bool:
        """Whether it was stopped by a signal at the last look."""
        return self._activity.stopped

    def silent_s(self) -> float:
        """For how long the rank has owed something and said nothing."""
        return asyncio.get_running_loop().time() - self._heard_s if self.owed else 0.0

    def look(self) -> int:
        """How many looks in a row it has owed something and done nothing. Looks and not seconds: a frontend that was held up
        itself has looked once in that time."""
        active = self._activity.look()
        self._still_looks = 0 if active or not self.owed else self._still_looks + 1
        return self._still_looks

    def kill(self) -> None:
        """SIGKILL; a process that is gone is left alone (a pidfd never means another process)."""
        if self.pidfd >= 0:
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                return

    def fail(self, reason: str) -> None:
        """Tell everybody who waits for this rank, or will, that the engine has died."""
        self._failed = reason
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDied(reason))
        for tokens in self._streams.values():
            tokens.put_nowait(EngineDied(reason))
        self._answers.clear()
        self._streams.clear()

    async def close(self) -> None:
        """Stop listening and let go of the process, which must have been killed. Safe to repeat."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _begin(self, command: Command, waits: dict[int, _Wait], wait: _Wait) -> None:
        """Send it, and know who waits for its answer. EngineError, and then nobody does."""
        if self._failed is not None:
            raise EngineDied(self._failed)
        framed = frame(command)  # before it is owed: what is never sent is never answered, and would count as a hang
        waits[command.n] = wait
        self._send(framed)

    def _send(self, framed: bytes) -> None:
        assert self._writer is not None, "a spawned rank has a writer"
        if self._writer.is_closing():
            return
        if len(self.owed) == 1:
            self._still_looks = 0
            self._heard_s = asyncio.get_running_loop().time()
        self._writer.write(framed)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while True:
            self._handle(await read(reader))

    def _stopped_listening(self, listener: asyncio.Task[None]) -> None:
        """The process is gone, or it said something that it must not say; either way it is of no more use."""
        if not listener.cancelled() and not self._has_said_why:
            error = listener.exception()
            gone = isinstance(error, asyncio.IncompleteReadError | ConnectionError)
            self._watcher.lose(f"rank {self.rank} (pid {self.pid}) {'ended' if gone else f'sent nonsense: {error}'}")

    def _handle(self, message: Command | Reply) -> None:
        self._heard_s, self._still_looks = asyncio.get_running_loop().time(), 0
        match message:
            case Loading():
                self._watcher.note(self.rank, message)
            case Failed(reason=reason):
                self._has_said_why = True
                why = f"rank {self.rank} (pid {self.pid}) failed: {reason}"
                asyncio.get_running_loop().call_later(LISTEN_ON_S, self._watcher.lose, why)
            case Decoded(n=n, last=last):
                if n in self._streams:
                    self._streams[n].put_nowait(message)
                if last:
                    self._streams.pop(n, None)
            case _:
                assert isinstance(message, Reply), f"a rank replies; it does not send {message.kind}"
                answer = self._answers.pop(message.n, None)
                if answer is None or answer.done():
                    return  # the asker has stopped waiting
                if isinstance(message, Refused):
                    answer.set_exception(EngineError(message.reason))
                else:
                    answer.set_result(message)
