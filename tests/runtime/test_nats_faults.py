"""What holds on a real server that crashes, loses its disk, or is cut off."""

import asyncio
import shutil
import time
from pathlib import Path

import pytest

from cli.embedded.nats import EmbeddedNats
from shared.contracts.envelope import Envelope
from shared.runtime import nats_tail
from shared.runtime.nats_log import NatsLog
from shared.runtime.outbox import Outbox
from shared.runtime.ports import Entry, LogLost, NoReply, Unavailable
from tests.runtime.conftest import CLOCK, SUBJECTS, NatsClient
from tests.runtime.reading import Reading, until
from tests.runtime.test_fence import Decider, check
from tests.runtime.writing import contents, follower, lost, outbox, registered


async def write_for(out: Outbox, seconds: float, written: list[Envelope]) -> None:
    """Record about 500 events a second."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        make = lost if len(written) % 3 == 0 else registered
        written += out.record([make(len(written) + each) for each in range(1, 6)])
        await asyncio.sleep(0.01)


async def test_a_crash_of_the_server_under_load_loses_and_repeats_nothing(
    nats: NatsClient, nats_server: EmbeddedNats
) -> None:
    outs = [await outbox(await nats.log(), f"router-{n}", CLOCK) for n in range(2)]
    observer = follower(await nats.log())
    await observer.start()
    written: list[list[Envelope]] = [[], []]
    writing = [asyncio.create_task(write_for(out, 3, events)) for out, events in zip(outs, written, strict=True)]
    for pause in (0.5, 0.5):
        await asyncio.sleep(pause)
        await asyncio.to_thread(nats_server.stop, kill=True)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(nats_server.start)
    await asyncio.gather(*writing)
    async with asyncio.timeout(60):
        for out, events in zip(outs, written, strict=True):
            await out.stored(events[-1])
        stored = await contents(await nats.log())
        for each in (observer, *(out._projection for out in outs)):
            await each.folded(len(stored))
    for out, events in zip(outs, written, strict=True):
        source = events[0].source
        assert [event for event in stored if event.source == source] == events, (
            "the log has each of them once, in order"
        )
        assert [event.source_seq for event in events] == list(range(1, len(events) + 1))
        assert [event for event in out._projection.state if event.source == source] == events
        assert len(out._projection.state) == len(stored)
    assert observer.state == stored
    for projection in (observer, *(out._projection for out in outs)):
        await projection.stop()
    for out in outs:
        await out.stop()


async def test_deciders_survive_crashes_of_the_server(nats: NatsClient, nats_server: EmbeddedNats) -> None:
    deciders = [Decider(await nats.log(), name, CLOCK) for name in ("a", "b")]
    for each in deciders:
        await each.projection.start()
    end = time.monotonic() + 2.5

    async def act(decider: Decider) -> None:
        while time.monotonic() < end:
            await decider.decide(2)
            await asyncio.sleep(0.002)

    acting = [asyncio.create_task(act(each)) for each in deciders]
    for _ in range(2):
        await asyncio.sleep(0.4)
        await asyncio.to_thread(nats_server.stop, kill=True)
        await asyncio.to_thread(nats_server.start)
    await asyncio.wait_for(asyncio.gather(*acting), 60)
    log = await nats.log()
    assert (await log.bounds())[1] > 30
    await check(log, deciders)
    for each in deciders:
        await each.projection.stop()


async def test_a_stream_that_is_deleted_ends_the_tail(nats: NatsClient) -> None:
    log, tail = await tail_with_one_event(nats)
    link = await nats.link()
    await link.client.jetstream().delete_stream(SUBJECTS.stream)
    error = await asyncio.wait_for(tail.failed(), 60)
    assert isinstance(error, LogLost)
    assert "is gone" in str(error)
    with pytest.raises(LogLost):
        await log.bounds()
    with pytest.raises(Unavailable):
        await log.append([Entry(SUBJECTS.control, nats.ids.next(), "x", b"x")], {})
    await tail.stop()


async def test_a_stream_that_is_recreated_ends_the_tail(nats: NatsClient) -> None:
    log, tail = await tail_with_one_event(nats)
    link = await nats.link()
    await link.client.jetstream().delete_stream(SUBJECTS.stream)
    new_log = await nats.log()
    assert new_log.identity != log.identity
    error = await asyncio.wait_for(tail.failed(), 60)
    assert isinstance(error, LogLost)
    assert f"it is log {new_log.identity}, not {log.identity}" in str(error)
    await tail.stop()


async def test_a_server_whose_disk_went_back_ends_the_tail(
    nats: NatsClient, nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    _, tail = await tail_with_one_event(nats)
    await asyncio.to_thread(nats_server.stop)
    store = nats_server.directory / "store"
    shutil.copytree(store, tmp_path / "backup")
    await asyncio.to_thread(nats_server.start)
    out = await outbox(await nats.log(), "router-2", CLOCK)
    recorded = out.record([registered(n) for n in range(20)])
    await out.stored(recorded[-1])
    await until(lambda: tail._delivered_seq == 21)
    await asyncio.to_thread(nats_server.stop)
    shutil.rmtree(store)
    shutil.copytree(tmp_path / "backup", store)
    await asyncio.to_thread(nats_server.start)
    error = await asyncio.wait_for(tail.failed(), 60)
    assert "went back to 1; 21 had been delivered" in str(error)
    # The outbox finds out by itself: its subject is empty although nothing has aged out.
    out.record([registered(21)])
    assert isinstance(await asyncio.wait_for(out.failed(), 60), LogLost)
    for each in (tail, out, out._projection):
        await each.stop()


async def test_a_tail_that_was_away_while_the_log_moved_on_says_so(nats: NatsClient) -> None:
    async with nats.proxied() as (proxy, proxied):
        reading = Reading()
        tail = await (await proxied.log()).tail([SUBJECTS.all_events], 0, reading.deliver)
        out = await outbox(await nats.log(), "router-1", CLOCK)
        await out.stored(out.record([registered(1)])[0])
        await reading.reach(1)
        proxy.cut()
        recorded = out.record([registered(n) for n in range(2, 8)])
        await out.stored(recorded[-1])
        await (await nats.link()).client.jetstream().purge_stream(SUBJECTS.stream, seq=5)
        proxy.heal()
        error = await asyncio.wait_for(tail.failed(), 60)
        assert "now begins at 5; only 1 had been reached" in str(error)
        for each in (tail, out, out._projection):
            await each.stop()


async def test_a_tail_behind_a_filter_is_not_alarmed_by_what_it_does_not_read(nats: NatsClient) -> None:
    """Heartbeats say how far the server has looked; only what the filter lets through is delivered."""
    async with nats.proxied() as (proxy, proxied):
        reading = Reading()
        tail = await (await proxied.log()).tail([SUBJECTS.control], 0, reading.deliver)
        out = await outbox(await nats.log(), "router-1", CLOCK)
        recorded = out.record([registered(n) for n in range(10)])
        await out.stored(recorded[-1])
        await until(lambda: tail._scanned_seq == 10)
        proxy.cut()
        await (await nats.link()).client.jetstream().purge_stream(SUBJECTS.stream, seq=10)
        proxy.heal()
        decider = Decider(await nats.log(), "a", CLOCK)
        await decider.projection.start()
        await decider.decide()
        assert [seq for _, seq, _ in await reading.reach(11)] == [11]
        for each in (tail, out, out._projection, decider.projection):
            await each.stop()


async def test_a_cut_connection_is_resumed_without_gap_or_repeat(nats: NatsClient) -> None:
    async with nats.proxied() as (proxy, proxied):
        reading = Reading()
        tail = await (await proxied.log()).tail([SUBJECTS.all_events], 0, reading.deliver)
        out = await outbox(await nats.log(), "router-1", CLOCK)
        written: list[Envelope] = []
        writing = asyncio.create_task(write_for(out, 2, written))
        for _ in range(4):
            await asyncio.sleep(0.2)
            proxy.cut()
            await asyncio.sleep(0.1)
            proxy.heal()
        await writing
        await out.stored(written[-1])
        assert [seq for _, seq, _ in await reading.reach(len(written))] == list(range(1, len(written) + 1))
        for each in (tail, out, out._projection):
            await each.stop()


async def test_acknowledgements_lost_on_the_wire_repeat_nothing(
    nats: NatsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.runtime.nats_log.ANSWER_LIMIT_S", 0.3)
    async with nats.proxied() as (proxy, proxied):
        log = await proxied.log()
        out = await outbox(log, "router-1", CLOCK)
        written: list[Envelope] = []
        for round_number in range(5):
            written += out.record([registered(n) for n in range(1 if round_number % 2 else 30)])
            proxy.answers_lost = True
            await asyncio.sleep(0.1)
            assert out.events, "no acknowledgement can have arrived"
            proxy.cut()
            proxy.heal()
            await asyncio.wait_for(out.stored(written[-1]), 60)
        assert await contents(await nats.log()) == written
        for each in (out, out._projection):
            await each.stop()


async def test_messages_the_client_drops_are_fetched_again(nats: NatsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are missed between two that arrive, some at the end, where only a heartbeat tells."""
    monkeypatch.setattr(nats_tail, "BUFFER_BYTES_MAX", 20_000)
    log = await nats.log()
    await log.append([Entry(SUBJECTS.control, nats.ids.next(), "x", bytes(2_000)) for _ in range(60)], {})

    class Slow(Reading):
        def deliver(self, subject: str, seq: int, raw: bytes) -> None:
            super().deliver(subject, seq, raw)
            time.sleep(0.001)  # nothing is read meanwhile, so that more arrives at once than the buffer holds

    reading = Slow()
    tail = await log.tail([SUBJECTS.all_events], 0, reading.deliver)
    turn = tail._turn
    assert [seq for _, seq, _ in await reading.reach(60, limit_s=30)] == list(range(1, 61))
    assert tail._turn > turn, "the drop this is about must happen"
    await tail.stop()


async def test_while_the_server_is_away_everything_says_so_at_once(nats: NatsClient, nats_server: EmbeddedNats) -> None:
    log, tail = await tail_with_one_event(nats)
    await asyncio.to_thread(nats_server.stop, kill=True)
    await until(lambda: not log._link.client.is_connected)
    for call in (
        log.append([Entry(SUBJECTS.control, nats.ids.next(), "x", b"x")], {}),
        log.last_on(SUBJECTS.control),
        log.bounds(),
        log.tail([SUBJECTS.control], 0, Reading().deliver),
    ):
        with pytest.raises(Unavailable, match="is away"):
            await call
    nats_server.start()
    await tail.stop()


async def tail_with_one_event(nats: NatsClient) -> tuple[NatsLog, nats_tail.NatsTail]:
    log = await nats.log()
    reading = Reading()
    tail = await log.tail([SUBJECTS.all_events], 0, reading.deliver)
    out = await outbox(log, "router-1", CLOCK)
    await out.stored(out.record([registered(1)])[0])
    await reading.reach(1)
    await out.stop()
    await out._projection.stop()
    return log, tail


async def test_a_request_is_not_sent_after_its_time(nats: NatsClient, nats_server: EmbeddedNats) -> None:
    asking, answering = await nats.bus(), await nats.bus()
    seen: list[bytes] = []

    async def answer(_subject: str, payload: bytes) -> bytes:
        seen.append(payload)
        return payload

    await answering.subscribe("vertumnus.test.agent.n0", answer)
    await asyncio.to_thread(nats_server.stop, kill=True)
    await until(lambda: not asking._link.client.is_connected)
    with pytest.raises(NoReply, match=r"within 0\.2 s"):
        await asking.request("vertumnus.test.agent.n0", b"given up", 0.2)
    waiting = asyncio.create_task(asking.request("vertumnus.test.agent.n0", b"waited for", 10))
    await asyncio.to_thread(nats_server.start)
    for _ in range(20):  # the other side may reconnect later
        try:
            assert await waiting == b"waited for"
            break
        except NoReply:
            await asyncio.sleep(0.1)
            waiting = asyncio.create_task(asking.request("vertumnus.test.agent.n0", b"waited for", 10))
    assert seen == [b"waited for"]


async def test_a_message_larger_than_the_server_takes_is_refused_with_its_limit(nats: NatsClient) -> None:
    bus = await nats.bus()
    for call in (
        bus.publish("vertumnus.test.x", bytes(2_000_000)),
        bus.request("vertumnus.test.x", bytes(2_000_000), 1),
    ):
        with pytest.raises(ValueError, match="2000000 bytes; the server takes at most 1048576"):
            await call


@pytest.mark.parametrize("turns", range(4))
async def test_a_link_closes_in_peace_while_it_loses_its_server(
    nats: NatsClient, nats_server: EmbeddedNats, turns: int
) -> None:
    link = await nats.link()
    await asyncio.to_thread(nats_server.stop, kill=True)
    async with asyncio.timeout(60):
        while not link.client.is_reconnecting:  # noqa: ASYNC110 - the very turn of the loop matters
            await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    await asyncio.wait_for(link.close(), 60)
    assert link.client.is_closed


@pytest.mark.parametrize("what", ["log", "bus"])
async def test_a_cancellation_that_arrives_with_the_answer_is_not_lost(nats: NatsClient, what: str) -> None:
    """A task that is cancelled ends, in whatever turn of the loop that happens."""
    log, bus = await nats.log(), await nats.bus()

    async def answer(_subject: str, payload: bytes) -> bytes:
        return payload

    await bus.subscribe("vertumnus.test.agent.n0", answer)

    async def ask() -> None:
        while True:
            await (log.bounds() if what == "log" else bus.request("vertumnus.test.agent.n0", b"", 5))

    for attempt in range(150):
        asking = asyncio.create_task(ask())
        for _ in range(attempt % 30):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking], timeout=30)
        assert asking.done(), f"attempt {attempt}: it goes on"
