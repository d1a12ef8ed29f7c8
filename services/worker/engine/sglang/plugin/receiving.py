"""The mailbox on SGLang's request receiver."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import zmq
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    msgpack_decode,
    sock_recv,
)
from sglang.srt.runtime_context import get_parallel

from services.worker.engine.sglang.plugin.mailbox import Mailbox
from services.worker.engine.sglang.plugin.wire import Op

WORK = (
    TokenizedGenerateReqInput,
    TokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    BatchTokenizedEmbeddingReqInput,
)

logger = logging.getLogger(__name__)


def is_commit(message: Any) -> bool:
    """Whether a control message is our commit."""
    numbers = getattr(message, "server_args", None)
    return isinstance(numbers, dict) and numbers.get("vertumnus_op") == Op.COMMIT


class Tap:
    """Stands before a unit's socket: sees commits go by, and is empty behind one until it was handled.

    Behind an abort of all requests it is empty until the next pull: of what is pulled together, SGLang handles work first, and
    would end with the abort what was sent after it. Held work comes all at once.
    """

    def __init__(self, socket: Any, mailbox: Mailbox) -> None:
        self._socket = socket
        self._mailbox = mailbox
        self._aborting = False

    def begin(self) -> None:
        """A pull begins."""
        self._aborting = False

    def recv_pyobj(self, flags: int = 0) -> Any:
        """SGLang's messages are pickled by default."""
        self._stop_if_must()
        message = self._socket.recv_pyobj(flags=flags)
        self._see(message)
        return message

    def recv(self, flags: int = 0) -> bytes:
        """They are msgpack with `SGLANG_USE_PICKLE_IPC=0`."""
        self._stop_if_must()
        octets: bytes = self._socket.recv(flags=flags)
        if b"vertumnus_op" in octets or b"AbortReq" in octets:
            self._see(msgpack_decode(octets))
        return octets

    def _stop_if_must(self) -> None:
        if self._aborting or self._mailbox.must_stop:
            raise zmq.Again

    def _see(self, message: Any) -> None:
        if is_commit(message):
            self._mailbox.took_commit()
        self._aborting = isinstance(message, AbortReq) and message.abort_all


class Receiving:
    """A hook around `SchedulerRequestReceiver._pull_raw_reqs`, and another around the sleep of an idle scheduler."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._tap: Tap | None = None
        self._tapped: Any = None

    def pull(self, original: Callable[[Any], Any], receiver: Any) -> Any:
        """What this unit is to handle now; None on ranks that are told by another."""
        socket = receiver.recv_from_tokenizer
        if socket is None:
            return original(receiver)
        leads = get_parallel().attn_cp_rank == 0
        self._drop_copies(socket, leads)
        if leads and self._mailbox.behind:
            return []  # the copy of the commit that made this unit a leader is still on the way
        if self._tap is None:
            self._tap = Tap(socket, self._mailbox)
            self._tapped = dataclasses.replace(receiver, recv_from_tokenizer=self._tap)
        self._tap.begin()
        return original(self._tapped)

    def sleep(self, original: Callable[[Any], None], sleeper: Any) -> None:
        """A follower waits in its leader's broadcast; to sleep on its own socket too would keep the group waiting."""
        if get_parallel().attn_cp_rank == 0:
            original(sleeper)

    def _drop_copies(self, socket: Any, leads: bool) -> None:
        while self._mailbox.may_drop(leads):
            try:
                message = sock_recv(socket, zmq.NOBLOCK)
            except zmq.Again:
                return
            if is_commit(message):
                self._mailbox.took_commit()
            elif isinstance(message, WORK):
                # There is none, or the controller has sent it astray.
                logger.error("vertumnus: dropped a request that was sent to a follower")
