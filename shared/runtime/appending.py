"""Append each event exactly once, whatever happens to the acknowledgement.

Every append states the sequence of the last message on each subject it writes to. When the answer is lost, the last message
of the subject is read back: if it is ours, the append had happened. A refusal with somebody else's message in our place
means that another process writes where only one may.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

import structlog

from shared.contracts.codec import BadEvent, decode, encode
from shared.contracts.envelope import Envelope, EventData
from shared.contracts.ids import Source
from shared.contracts.subjects import Subjects
from shared.runtime.clock import Clock, Ids
from shared.runtime.ports import Entry, EventLog, LogLost, Unavailable, WrongLastSequence

RETRY_S = 0.2


class Fenced(Exception):
    """Another process has written where only one may. This one must stop deciding. `seq` is where it wrote."""

    def __init__(self, message: str, seq: int) -> None:
        super().__init__(message)
        self.seq = seq


class Identity(NamedTuple):
    """Who publishes: `sender` is the token in the subject (the source itself, or the agent's node)."""

    pool: str
    source: Source
    sender: str


class Origin(NamedTuple):
    """What an event belongs to and what led to it."""

    correlation: str | None = None
    causation: UUID | None = None
    traceparent: str | None = None


NO_ORIGIN = Origin()


class Sealer:
    """Puts facts into envelopes, numbered gap-free per source."""

    def __init__(self, identity: Identity, subjects: Subjects, clock: Clock, ids: Ids) -> None:
        self.identity = identity
        self.next_seq = 1
        self._subjects = subjects
        self._clock = clock
        self._ids = ids

    def seal(self, facts: Sequence[EventData], origin: Origin) -> list[tuple[Envelope, Entry]]:
        """Envelopes and log entries for `facts`, in order. BadEvent if one is too large; no number is used up then."""
        sealed = []
        for seq, fact in enumerate(facts, self.next_seq):
            envelope = Envelope(
                id=self._ids.next(),
                type=fact.TYPE,
                version=fact.VERSION,
                pool=self.identity.pool,
                source=self.identity.source,
                source_seq=seq,
                time_ns=self._clock.now_ns(),
                correlation=origin.correlation,
                causation=origin.causation,
                traceparent=origin.traceparent,
                data=fact,
            )
            subject = self._subjects.event(fact.CHANNEL, self.identity.sender)
            sealed.append((envelope, Entry(subject, envelope.id, envelope.type, encode(envelope))))
        self.next_seq += len(sealed)
        return sealed


async def append_once(log: EventLog, entries: Sequence[Entry], expected: Mapping[str, int], clock: Clock) -> int:
    """Store all of `entries`, trying for as long as the log is away. Returns the sequence of the last.

    Errors: Fenced if somebody else wrote to one of the subjects; LogLost.
    """
    logger = structlog.get_logger(component="appending")
    relied_on = dict(expected)
    refusals = 0
    stored: int | None
    while True:
        try:
            stored = await log.append(entries, relied_on)
        except (Unavailable, WrongLastSequence) as refusal:
            refusals += 1
            if refusals == 1:
                logger.warning("append not acknowledged", events=len(entries), reason=str(refusal))
            stored = await _read_back(log, entries, relied_on, clock)
        if stored is not None:
            if refusals:
                logger.info("append settled", events=len(entries), refusals=refusals)
            return stored
        await clock.sleep(RETRY_S)


async def last_sequence(log: EventLog, subject: str, clock: Clock) -> int:
    """The last sequence on `subject`, 0 for none; waits while the log is away."""
    while True:
        try:
            found = await log.last_on(subject)
        except Unavailable:
            await clock.sleep(RETRY_S)
        else:
            return found[0] if found else 0


async def _read_back(log: EventLog, entries: Sequence[Entry], relied_on: dict[str, int], clock: Clock) -> int | None:
    """The sequence of the last entry if the log holds it; None if the append may be repeated. Waits while the log is away.

    Errors: Fenced; LogLost.
    """
    while True:
        try:
            found = await log.last_on(entries[-1].subject)
            if found and _id_in(found[1]) == entries[-1].id:
                return found[0]
            for subject in relied_on:
                await _check_reliance(log, entries, relied_on, subject)
            return None
        except Unavailable:
            await clock.sleep(RETRY_S)


async def _check_reliance(log: EventLog, entries: Sequence[Entry], relied_on: dict[str, int], subject: str) -> None:
    """Whether what the append relied on still holds.

    A refusal alone proves nothing: a cluster's leader refuses a repeat while the first copy is still on its way through it.
    """
    expected = relied_on[subject]
    seq, raw = await log.last_on(subject) or (0, b"")
    if seq > expected:
        if _id_in(raw) not in {entry.id for entry in entries}:
            raise Fenced(f"another process has written to {subject}", seq)
    elif seq < expected:
        first, _ = await log.bounds()
        if seq or first <= expected:
            raise LogLost(f"{subject} went back from {expected} to {seq}")
        # Its messages have aged out; the server takes an empty subject for 0.
        relied_on[subject] = 0


def _id_in(raw: bytes) -> UUID | None:
    try:
        return decode(raw).id
    except BadEvent:
        return None
