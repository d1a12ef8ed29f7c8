"""What recording and folding cost one process: `python -m bench.log`. Starts a NATS server of its own.

The events are those of `bench.ledger_traffic`, about eight per request. Prints the median of five runs: what the clock says,
and the process's CPU time, which is what remains comparable on a machine that has other things to do.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import uvloop

from bench.ledger_traffic import Traffic
from cli.embedded.nats import EmbeddedNats
from shared.contracts.codec import decode, encode
from shared.contracts.envelope import Channel, EventData
from shared.contracts.events import RequestAssigned
from shared.contracts.ids import Source
from shared.contracts.subjects import Subjects
from shared.model.holders import Holders
from shared.model.holders import evolve as evolve_holders
from shared.runtime.appending import NO_ORIGIN, Identity, Sealer
from shared.runtime.clock import Ids, SystemClock
from shared.runtime.nats_link import connect
from shared.runtime.nats_log import NatsLog, open_log
from shared.runtime.outbox import Outbox
from shared.runtime.projection import Projection
from shared.runtime.settings import ServiceSettings

RUNS = 5
SINGLE_EVENTS = 500
REQUESTS = 2_000
CLOCK = SystemClock()
SUBJECTS = Subjects("bench")


class Cost(NamedTuple):
    """For `events` events."""

    events: int
    wall_s: float
    cpu_s: float


class Stopwatch:
    """Started when it is made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self, events: int) -> Cost:
        return Cost(events, time.perf_counter() - self._wall, time.process_time() - self._cpu)


def requests(count: int) -> Iterator[list[EventData]]:
    traffic = Traffic(seed=1)
    yield [told.fact for told in traffic.start()]
    for _ in range(count):
        yield [told.fact for told in traffic.request()]


def sealer(name: str) -> Sealer:
    return Sealer(Identity("bench", Source(name), name), SUBJECTS, CLOCK, Ids(CLOCK, random.Random(name)))


async def started(log: NatsLog, name: str) -> Outbox:
    """An outbox whose projection folds nothing, so that what is measured is the outbox."""
    projection: Projection[None] = Projection(log, [SUBJECTS.cache_control], None, lambda _state, _stored: None)
    await projection.start()
    outbox = Outbox(projection, sealer(name), CLOCK)
    await outbox.start()
    return outbox


async def single(log: NatsLog, name: str) -> list[float]:
    """One assignment at a time, each awaited: what a request waits for before its agent is told. Microseconds."""
    outbox = await started(log, name)
    assignments = [fact for facts in requests(2 * SINGLE_EVENTS) for fact in facts if isinstance(fact, RequestAssigned)]
    waits_us = []
    for fact in assignments[:SINGLE_EVENTS]:
        begin = time.perf_counter()
        (event,) = outbox.record([fact])
        await outbox.stored(event)
        waits_us.append((time.perf_counter() - begin) * 1e6)
    await outbox.stop()
    return waits_us


async def recording(log: NatsLog, name: str) -> Cost:
    """As fast as an outbox takes them: batches form by themselves."""
    outbox = await started(log, name)
    facts_of = list(requests(REQUESTS))
    watch = Stopwatch()
    for facts in facts_of:
        event = outbox.record(facts)[-1]
        if outbox.events > 5_000:
            await outbox.stored(event)
    await outbox.stored(event)
    cost = watch.read(event.source_seq)
    await outbox.stop()
    return cost


async def folding(log: NatsLog, name: str) -> Cost:
    """Start a projection of who holds what over what `recording` has stored under `name`."""
    channels = (Channel.REQUESTS, Channel.WORKERS, Channel.CACHE)
    projection = Projection(log, [SUBJECTS.event(each, name) for each in channels], Holders(), evolve_holders)
    watch = Stopwatch()
    await projection.start()
    cost = watch.read(projection.last_of(Source(name)).source_seq)
    await projection.stop()
    projection.state.check()
    return cost


def coding(name: str) -> dict[str, Cost]:
    facts = [fact for facts in requests(300) for fact in facts]
    envelopes = [envelope for envelope, _ in sealer(name).seal(facts, NO_ORIGIN)]
    watch = Stopwatch()
    raws = [encode(envelope) for envelope in envelopes]
    costs = {f"encode, {sum(map(len, raws)) // len(raws)} bytes each": watch.read(len(raws))}
    watch = Stopwatch()
    for raw in raws:
        decode(raw)
    return {**costs, "decode": watch.read(len(raws))}


def show(name: str, costs: list[Cost]) -> None:
    per_s = statistics.median(cost.events / cost.wall_s for cost in costs)
    cpu_us = statistics.median(cost.cpu_s / cost.events * 1e6 for cost in costs)
    print(f"{name:32} {per_s:10,.0f} events/s {cpu_us:8.1f} µs of CPU per event")


async def measured(run: Callable[[str], Awaitable[Cost]], prefix: str) -> list[Cost]:
    return [await run(f"{prefix}-{number}") for number in range(RUNS)]


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder, EmbeddedNats(Path(folder) / "nats", sync_always=False) as server:
        link = await connect(server.url, "bench")
        log = await open_log(link, SUBJECTS, ServiceSettings(), CLOCK, Ids(CLOCK, random.Random(0)))
        cuts = [statistics.quantiles(await single(log, f"single-{number}"), n=100) for number in range(RUNS)]
        for percent in (50, 99):
            print(f"record → stored, p{percent:<16} {statistics.median(cut[percent - 1] for cut in cuts):10,.0f} µs")
        show("outbox, recorded and stored", await measured(lambda name: recording(log, name), "many"))
        show("projection, decoded and folded", await measured(lambda name: folding(log, name), "many"))
        runs = [coding(f"codec-{number}") for number in range(RUNS)]
        for name in runs[0]:
            show(name, [run[name] for run in runs])
        await link.close()


if __name__ == "__main__":
    uvloop.run(main())
