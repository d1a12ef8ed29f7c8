"""What services may ask of the outside world. NATS is behind these (`shared.runtime.nats_*`), and so is the simulator's
in-memory world (`shared.runtime.memory`); one test suite runs against both.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol
from uuid import UUID


class Unavailable(Exception):
    """The server is away, or did not answer in time. Whether the call took effect is not known."""


class NoReply(Exception):
    """Nobody listens on the subject, or nobody answered in time."""


class WrongLastSequence(Exception):
    """Somebody else has written to the subject. Nothing of the append was stored."""


class LogLost(Exception):
    """The log is no longer the one this process has followed: recreated, gone back, or dropped too far ahead of it."""


APPEND_ENTRIES_MAX = 100
"""Entries in one append; a NATS server takes up to 1,000 in a batch."""

HANDLERS_MAX = 1_000
"""Messages of one subscription that are handled at a time; those behind wait."""


class Entry(NamedTuple):
    """One message to append. `id` de-duplicates repeats within the server's window."""

    subject: str
    id: UUID
    type: str
    payload: bytes


class Tail(Protocol):
    """A running ordered consumer."""

    async def stop(self) -> None:
        """No message is delivered after this returns."""

    async def failed(self) -> Exception:
        """Returns when the consumer can go on no longer: LogLost, or what `deliver` raised. Never after `stop`."""


Deliver = Callable[[str, int, bytes], None]
"""(subject, stream sequence, published bytes), in stream order, each once."""


def check_append(entries: Sequence[Entry], expected: Mapping[str, int]) -> None:
    """What every `EventLog` is entitled to; AssertionError for a caller that breaks it."""
    assert 0 < len(entries) <= APPEND_ENTRIES_MAX, f"{len(entries)} entries in one append"
    assert expected.keys() <= {entry.subject for entry in entries}, "an expectation for a subject not written to"


class EventLog(Protocol):
    """One pool's ordered log."""

    @property
    def identity(self) -> str:
        """The UUID of this incarnation of the log."""

    async def append(self, entries: Sequence[Entry], expected: Mapping[str, int]) -> int:
        """Store every entry in order, atomically and next to each other, or none. Returns the sequence of the last.

        `expected` gives, for subjects that are written to, the sequence of the last message on it (0 for none) that the
        append relies on. At most `APPEND_ENTRIES_MAX` entries.
        Errors: WrongLastSequence; Unavailable (read back with `last_on` before repeating).
        """

    async def last_on(self, subject: str) -> tuple[int, bytes] | None:
        """The last message on a subject (`*` and `>` allowed), with its sequence. Errors: Unavailable."""

    async def bounds(self) -> tuple[int, int]:
        """The first and the last sequence that are there; first = last + 1 for an empty log.

        Errors: Unavailable; LogLost if this is another incarnation of the log.
        """

    async def tail(self, filters: Sequence[str], after_seq: int, deliver: Deliver) -> Tail:
        """Deliver every message on `filters` (subjects, `*` and `>` allowed) after `after_seq`, then every new one, across
        reconnections. An exception out of `deliver` ends the tail. Errors: Unavailable; LogLost."""


Handler = Callable[[str, bytes], Awaitable[bytes | None]]
"""(subject, payload) → the reply, or None for none."""


class Bus(Protocol):
    """Unlogged messages: at most once, no order between subjects."""

    async def publish(self, subject: str, payload: bytes) -> None:
        """Hand over to the client's buffer. Errors: Unavailable when the buffer is full; ValueError over a message that is
        larger than the server takes."""

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """The one reply. Nothing is sent while the server is away. Errors: NoReply; ValueError as for `publish`."""

    async def subscribe(self, subject: str, handler: Handler) -> None:
        """Run `handler` for each message, one task per message and at most `HANDLERS_MAX` at a time, until the bus closes.

        A handler that raises is logged and answers nothing. Returns when messages published from now on arrive.
        """


class Cell(Protocol):
    """One record with a revision that rises with every write."""

    async def read(self) -> tuple[int, bytes] | None:
        """Revision and value; None before the first write. Errors: Unavailable."""

    async def write(self, value: bytes, revision: int) -> int:
        """Replace what `revision` (0: nothing) wrote; returns the new revision.

        Errors: WrongLastSequence if somebody else has written since; Unavailable.
        """


class Lease(Protocol):
    """Leadership of one role in one pool, for a limited time."""

    async def acquire(self) -> int | None:
        """The term, if this process now leads; None while another does. Terms only rise. Errors: Unavailable."""

    async def renew(self) -> bool:
        """False when the lease has been lost. Errors: Unavailable."""

    async def release(self) -> None:
        """Let a standby take over at once."""
