"""Following the stream from the command line."""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from shared.contracts.codec import BadEvent, decode
from shared.contracts.envelope import latest_versions
from shared.contracts.subjects import Subjects
from shared.runtime.clock import Ids, SystemClock
from shared.runtime.nats_link import connect
from shared.runtime.nats_log import find_log
from shared.runtime.settings import ServiceSettings

OF_A_TYPE_MAX = 100_000
"""How far back events of a type are looked for."""


async def tail(
    nats_url: str, last: int, follow: bool, kinds: frozenset[str], tell: Callable[[int, bytes], None]
) -> None:
    """Tell the `last` newest messages of the pool's stream, and new ones if `follow`; of `kinds`, if there are any.

    What is of a kind is looked for further back: half a minute of scans of a new pool is more than 50 events.

    Errors: Unavailable; LogLost; ServerUnfit.
    """
    settings = ServiceSettings(nats_url=nats_url)
    subjects, clock = Subjects(settings.pool), SystemClock()
    link = await connect(nats_url, "vertumnus-events", settings.nats_user, settings.nats_password())
    try:
        log = await find_log(link, subjects, clock, Ids(clock, random.Random()))
        first_seq, last_seq = await log.bounds()
        reached = asyncio.Event()
        newest: deque[tuple[int, bytes]] = deque(maxlen=last)
        names = [kind.encode() for kind in kinds]

        def tell_newest() -> None:
            while newest:
                tell(*newest.popleft())

        def deliver(subject: str, seq: int, raw: bytes) -> None:  # noqa: ARG001 - the shape of `Deliver`
            if seq > last_seq:
                tell_newest()
            # Most are of no asked kind, and are not decoded to find that out.
            if (follow or seq <= last_seq) and (
                not kinds or (any(name in raw for name in names) and kind_of(raw) in kinds)
            ):
                if kinds and seq <= last_seq:
                    newest.append((seq, raw))
                else:
                    tell(seq, raw)
            if seq >= last_seq:
                tell_newest()
                reached.set()

        back = max(last, OF_A_TYPE_MAX) if kinds and last else last
        after_seq = max(first_seq - 1, last_seq - back)
        if after_seq == last_seq and not follow:
            return
        tailing = await log.tail([subjects.all_events], after_seq, deliver)
        try:
            await _end_of(asyncio.ensure_future(tailing.failed()), None if follow else reached)
        finally:
            await tailing.stop()
    finally:
        await link.close()


def known_kinds(kinds: Iterable[str]) -> frozenset[str]:
    """The asked types of events. Errors: ValueError for one that there is not: a slip of the pen is no empty answer."""
    known, asked = latest_versions(), frozenset(kinds)
    for kind in asked - known.keys():
        near = get_close_matches(kind, known)
        told = f"there is {', '.join(near)}" if near else "docs/events.md lists them"
        raise ValueError(f"no event is called {kind}; {told}")
    return asked


def kind_of(raw: bytes) -> str:
    """The type of a message, empty for bytes that are no event."""
    try:
        return decode(raw).type
    except BadEvent:
        return ""


async def _end_of(failing: "asyncio.Future[Exception]", reached: asyncio.Event | None) -> None:
    """Returns when the wanted messages are told, never if there is no end to them. Raises what the tail ends with."""
    waits: set[asyncio.Future[object]] = {failing}  # type: ignore[arg-type]  # a future of any result will do
    if reached is not None:
        waits.add(asyncio.ensure_future(reached.wait()))
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            raise failing.result()
    finally:
        for each in waits:
            each.cancel()
