"""The event log on a JetStream stream.

What NATS 2.15.1 does with an append, measured; `append` is built on it and `tests/runtime` holds it to it:

- Only the first message on each subject of an atomic batch may carry an expected last sequence, and it is compared with the
  stream before the batch. One on a later message of the same subject refuses the whole batch (error 10164), whether it
  names the sequence before the batch or the one the message before it is about to get. A violation anywhere (10071) stores
  nothing and is reported in the answer to the commit.
- A stored batch has consecutive sequences; the commit's answer holds the last.
- A repeated single message is answered `duplicate` only if its expected sequence fits, which after a first success it does
  not: then it is refused (10071) before its id is looked at. A repeated batch inside the duplicate window is refused for its
  ids (10201). So both are `WrongLastSequence` here, and the caller reads back what lies there (`appending.py`).
- An expectation about a subject whose messages have all aged out is compared with 0.
"""

from collections.abc import Mapping, Sequence
from uuid import UUID

import nats.errors
import nats.js.errors
import orjson
import structlog
from nats.js.api import DiscardPolicy, Header, RetentionPolicy, StorageType, StreamConfig, StreamInfo

from shared.contracts.subjects import TYPE_HEADER, Subjects
from shared.runtime.clock import Clock, Ids
from shared.runtime.nats_link import NatsLink
from shared.runtime.nats_streams import create_or_find
from shared.runtime.nats_tail import NatsTail
from shared.runtime.ports import Deliver, Entry, LogLost, Unavailable, WrongLastSequence, check_append
from shared.runtime.server_checks import ServerUnfit
from shared.runtime.settings import ServiceSettings

ANSWER_LIMIT_S = 3.0
"""For one call to the server. A leader's election in a cluster takes about 6 s: two or three repeats."""

DUPLICATE_WINDOW_S = 120.0
IDENTITY_KEY = "vertumnus-log"

EXPECTED_HEADER = str(Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value)
ID_HEADER = str(Header.MSG_ID.value)
BATCH_ID_HEADER, BATCH_SEQUENCE_HEADER, BATCH_COMMIT_HEADER = (
    "Nats-Batch-Id",
    "Nats-Batch-Sequence",
    "Nats-Batch-Commit",
)

_REFUSED_BY_SEQUENCE = {10071, 10164, 10201}


class NatsLog:
    """An `EventLog`. Made by `open_log`."""

    def __init__(self, link: NatsLink, stream: str, identity: str, clock: Clock, ids: Ids) -> None:
        self._link = link
        self._stream = stream
        self._identity = identity
        self._clock = clock
        self._ids = ids
        self._js = link.client.jetstream(timeout=ANSWER_LIMIT_S)

    @property
    def identity(self) -> str:
        return self._identity

    async def append(self, entries: Sequence[Entry], expected: Mapping[str, int]) -> int:
        check_append(entries, expected)
        unstated = dict(expected)
        batch = self._ids.next().hex
        async with self._link.calling(f"append to {self._stream}", ANSWER_LIMIT_S):
            for number, entry in enumerate(entries, 1):
                headers = {ID_HEADER: str(entry.id), TYPE_HEADER: entry.type}
                if (last := unstated.pop(entry.subject, None)) is not None:
                    headers[EXPECTED_HEADER] = str(last)
                if len(entries) > 1:
                    headers |= {BATCH_ID_HEADER: batch, BATCH_SEQUENCE_HEADER: str(number)}
                if number < len(entries):
                    await self._link.client.publish(entry.subject, entry.payload, headers=headers)
            if len(entries) > 1:
                headers[BATCH_COMMIT_HEADER] = "1"
            answer = await self._link.client.request(
                entry.subject, entry.payload, timeout=ANSWER_LIMIT_S, headers=headers
            )
        return _acknowledged(answer.data)

    async def last_on(self, subject: str) -> tuple[int, bytes] | None:
        # Asked of the stream's leader, not of any replica: what was acknowledged must be seen.
        async with self._link.calling(f"read {subject}", ANSWER_LIMIT_S):
            try:
                found = await self._js.get_last_msg(self._stream, subject)
            except nats.js.errors.NotFoundError:
                found = None
        if found is None:
            await self._info()
            return None
        assert found.seq is not None, "a stored message has a sequence"
        return found.seq, found.data or b""

    async def bounds(self) -> tuple[int, int]:
        state = (await self._info()).state
        return (state.first_seq, state.last_seq) if state.messages else (state.last_seq + 1, state.last_seq)

    async def tail(self, filters: Sequence[str], after_seq: int, deliver: Deliver) -> NatsTail:
        tail = NatsTail(self._link, self._stream, self._info, filters, after_seq, deliver, self._clock)
        await tail.start()
        return tail

    async def _info(self) -> StreamInfo:
        """Errors: Unavailable; LogLost if the stream is gone or another one."""
        async with self._link.calling(f"stream {self._stream}", ANSWER_LIMIT_S):
            try:
                info = await self._js.stream_info(self._stream)
            except nats.js.errors.NotFoundError:
                raise LogLost(f"stream {self._stream} is gone") from None
        found = (info.config.metadata or {}).get(IDENTITY_KEY)
        if found != self._identity:
            raise LogLost(f"stream {self._stream} was recreated: it is log {found}, not {self._identity}")
        return info


async def open_log(link: NatsLink, subjects: Subjects, settings: ServiceSettings, clock: Clock, ids: Ids) -> NatsLog:
    """The pool's log, created if this is the first service of the pool, on a server that `require_nats` has let through.

    Errors: ServerUnfit if the server or an existing stream cannot keep the log's promises; Unavailable.
    """
    # Each service that starts brings an identity of its own; the one that made the stream gave it its own.
    try:
        info = await create_or_find(link, _config(subjects, settings, ids.next()), clock, ANSWER_LIMIT_S)
        identity = _identity_in(info, subjects)
        await _set_limits(link, info, settings)
    except nats.js.errors.ServiceUnavailableError as error:
        raise Unavailable(f"stream {subjects.stream}: {error.description}") from error
    except nats.js.errors.APIError as error:
        raise ServerUnfit(
            f"NATS at {link.addresses}: stream {subjects.stream}: {error.description}: see VERTUMNUS_STREAM_BYTES_MAX,"
            f" VERTUMNUS_STREAM_AGE_MAX_S and VERTUMNUS_STREAM_REPLICAS"
        ) from error
    except nats.errors.Error as error:
        raise Unavailable(f"stream {subjects.stream}: {error}") from error
    return NatsLog(link, subjects.stream, identity, clock, ids)


async def find_log(link: NatsLink, subjects: Subjects, clock: Clock, ids: Ids) -> NatsLog:
    """The pool's log as it is, for readers that must not create or change it. Errors: LogLost without one; ServerUnfit;
    Unavailable."""
    try:
        info = await link.client.jetstream(timeout=ANSWER_LIMIT_S).stream_info(subjects.stream)
    except nats.js.errors.NotFoundError:
        raise LogLost(
            f"NATS at {link.addresses} has no stream {subjects.stream}: no service of this pool has run"
        ) from None
    except nats.errors.Error as error:
        raise Unavailable(f"stream {subjects.stream}: {error}") from error
    return NatsLog(link, subjects.stream, _identity_in(info, subjects), clock, ids)


async def _set_limits(link: NatsLink, info: StreamInfo, settings: ServiceSettings) -> None:
    """Give the stream the limits that the settings ask for now."""
    changed = {name: value for name, value in _limits(settings).items() if getattr(info.config, name) != value}
    if changed:
        await link.client.jetstream(timeout=ANSWER_LIMIT_S).update_stream(info.config.evolve(**changed))
        structlog.get_logger(component="log").warning("stream limits changed", stream=info.config.name, **changed)


def _limits(settings: ServiceSettings) -> dict[str, float]:
    age_max_s = float(settings.stream_age_max_s)
    return {
        "max_age": age_max_s,
        "max_bytes": settings.stream_bytes_max,
        "num_replicas": settings.stream_replicas,
        "duplicate_window": min(DUPLICATE_WINDOW_S, age_max_s),
    }


def _config(subjects: Subjects, settings: ServiceSettings, identity: UUID) -> StreamConfig:
    return StreamConfig(
        name=subjects.stream,
        subjects=[subjects.all_events],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        allow_atomic=True,
        allow_direct=True,
        deny_delete=True,
        metadata={IDENTITY_KEY: str(identity)},
    ).evolve(**_limits(settings))


def _identity_in(info: StreamInfo, subjects: Subjects) -> str:
    """The identity of a stream that can hold the log; ServerUnfit names what it lacks."""
    config = info.config
    identity = (config.metadata or {}).get(IDENTITY_KEY)
    if identity is None:
        raise ServerUnfit(
            f"stream {config.name} exists but was not made by Vertumnus: its metadata lacks {IDENTITY_KEY}"
        )
    if not config.allow_atomic:
        raise ServerUnfit(f"stream {config.name} lacks allow_atomic: the server is too old, or somebody has changed it")
    if config.subjects != [subjects.all_events]:
        raise ServerUnfit(f"stream {config.name} holds {config.subjects} instead of {subjects.all_events}")
    return identity


def _acknowledged(answer: bytes) -> int:
    """The sequence in the server's answer. Errors: WrongLastSequence; Unavailable with the server's words."""
    fields = orjson.loads(answer)
    if (error := fields.get("error")) is None:
        return int(fields["seq"])
    if error.get("err_code") in _REFUSED_BY_SEQUENCE:
        raise WrongLastSequence(error["description"])
    raise Unavailable(f"refused by the server: {error['description']} (error {error.get('err_code')})")
