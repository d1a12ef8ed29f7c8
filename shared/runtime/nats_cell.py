"""Single records in NATS key-value buckets (each a stream `KV_<bucket>` with one message per key): leases, what is kept of
dropped events, and pieces of snapshots."""

from typing import NamedTuple

import nats.errors
import nats.js.errors
import structlog
from nats.js.api import DiscardPolicy, Header, StorageType, StreamConfig

from shared.contracts.subjects import Subjects
from shared.runtime.clock import Clock
from shared.runtime.nats_link import NatsLink
from shared.runtime.nats_streams import create_or_find
from shared.runtime.ports import Unavailable, WrongLastSequence

ANSWER_LIMIT_S = 1.0
"""A third of the lease: a leader that cannot reach the server gets to hear of it in time."""


CREATE_LIMIT_S = 5.0
"""A bucket of several replicas first elects its leader."""


class Bucket(NamedTuple):
    """`bytes_max` is named, so that the server sets it aside: the log's stream may claim all the rest."""

    name: str
    bytes_max: int


LEASES = Bucket("leases", 2**20)
KEEPSAKE = Bucket("keepsake", 4 * 2**20)
SNAPSHOTS = Bucket("snapshots", 2**30)

_WRONG_SEQUENCE = {10071, 10164}


class NatsCell:
    """A `Cell`: the record under one key. `open_buckets` has made its bucket."""

    def __init__(self, link: NatsLink, subjects: Subjects, bucket: Bucket, key: str) -> None:
        self._link = link
        self._stream = _stream(subjects, bucket)
        self._subject = f"{_keys(subjects, bucket)}.{key}"
        self._js = link.client.jetstream(timeout=ANSWER_LIMIT_S)

    async def read(self) -> tuple[int, bytes] | None:
        async with self._link.calling(f"record {self._subject}", ANSWER_LIMIT_S):
            try:
                # From the stream's leader: a replica may be behind.
                found = await self._js.get_last_msg(self._stream, self._subject)
            except nats.js.errors.NotFoundError:
                return None
        assert found.seq is not None, "a stored message has a sequence"
        return found.seq, found.data or b""

    async def write(self, value: bytes, revision: int) -> int:
        headers = {str(Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value): str(revision)}
        async with self._link.calling(f"record {self._subject}", ANSWER_LIMIT_S):
            try:
                return (await self._js.publish(self._subject, value, headers=headers)).seq
            except nats.js.errors.APIError as error:
                if error.err_code in _WRONG_SEQUENCE:
                    raise WrongLastSequence(f"record {self._subject}: {error.description}") from None
                raise


async def open_buckets(link: NatsLink, subjects: Subjects, replicas: int, clock: Clock) -> None:
    """Make the buckets without which no service runs, where they are not there. Errors: Unavailable."""
    for bucket in (LEASES, KEEPSAKE):
        await _open(link, subjects, bucket, replicas, clock)


async def open_snapshots(link: NatsLink, subjects: Subjects, replicas: int, clock: Clock) -> None:
    """The same of the bucket for snapshots, if the server has room for it: without them a start takes longer, and no more."""
    try:
        await _open(link, subjects, SNAPSHOTS, replicas, clock)
    except Unavailable as error:
        structlog.get_logger(component="snapshots").warning("no room for snapshots", error=str(error))


async def _open(link: NatsLink, subjects: Subjects, bucket: Bucket, replicas: int, clock: Clock) -> None:
    config = StreamConfig(
        name=_stream(subjects, bucket),
        subjects=[f"{_keys(subjects, bucket)}.>"],
        max_msgs_per_subject=1,
        max_bytes=bucket.bytes_max,
        discard=DiscardPolicy.NEW,
        storage=StorageType.FILE,
        num_replicas=replicas,
        allow_rollup_hdrs=True,
        deny_delete=True,
    )
    try:
        await create_or_find(link, config, clock, CREATE_LIMIT_S)
    except nats.js.errors.APIError as error:
        raise Unavailable(f"bucket {config.name}: {error.description}") from error
    except nats.errors.Error as error:
        raise Unavailable(f"bucket {config.name}: {error}") from error


def _keys(subjects: Subjects, bucket: Bucket) -> str:
    return f"$KV.{subjects.buckets_prefix}-{bucket.name}"


def _stream(subjects: Subjects, bucket: Bucket) -> str:
    return f"KV_{subjects.buckets_prefix}-{bucket.name}"
