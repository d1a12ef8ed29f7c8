"""The pool's stream: made once, whoever comes first, and refused if it cannot keep the log's promises."""

import asyncio
from pathlib import Path
from uuid import UUID

import pytest
from nats.js.api import StreamConfig

from cli.embedded.nats import EmbeddedNats
from shared.contracts.subjects import Subjects
from shared.runtime.nats_link import connect
from shared.runtime.nats_log import IDENTITY_KEY, open_log
from shared.runtime.ports import Entry, Unavailable
from shared.runtime.server_checks import ServerUnfit, require_nats
from shared.runtime.settings import ServiceSettings
from tests.runtime.conftest import CLOCK, SUBJECTS, NatsClient


async def test_services_that_start_at_once_agree_on_one_identity(nats: NatsClient) -> None:
    logs = await asyncio.gather(*(nats.log() for _ in range(8)))
    assert len({log.identity for log in logs}) == 1
    assert UUID(logs[0].identity).version == 7
    assert (await nats.log()).identity == logs[0].identity


async def test_services_that_start_at_once_find_room_for_one_stream(nats: NatsClient) -> None:
    """The server sets the stream's bytes aside for each that asks, and has 8 GiB: not for two."""
    settings = ServiceSettings(stream_bytes_max=5 * 2**30)
    for pool in range(20):
        subjects = Subjects(f"pool{pool}")
        links = await asyncio.gather(*(nats.link() for _ in range(4)))
        logs = await asyncio.gather(*(open_log(link, subjects, settings, CLOCK, nats.ids) for link in links))
        assert len({log.identity for log in logs}) == 1
        await links[0].client.jetstream().delete_stream(subjects.stream)


async def test_the_identity_outlives_the_server(nats: NatsClient, nats_server: EmbeddedNats) -> None:
    log = await nats.log()
    await asyncio.to_thread(nats_server.stop, kill=True)
    await asyncio.to_thread(nats_server.start)
    assert (await nats.log()).identity == log.identity


async def test_the_stream_is_what_the_settings_say_and_follows_them(nats: NatsClient) -> None:
    link = await nats.link()
    first = ServiceSettings(stream_bytes_max=2**22, stream_age_max_s=3600)
    log = await open_log(link, SUBJECTS, first, CLOCK, nats.ids)
    config = (await link.client.jetstream().stream_info(SUBJECTS.stream)).config
    assert (config.max_bytes, config.max_age, config.num_replicas) == (2**22, 3600, 1)
    assert (config.storage, config.discard, config.retention) == ("file", "old", "limits")
    assert config.allow_atomic
    assert config.subjects == [SUBJECTS.all_events]
    second = ServiceSettings(stream_bytes_max=2**23, stream_age_max_s=60)
    again = await open_log(link, SUBJECTS, second, CLOCK, nats.ids)
    config = (await link.client.jetstream().stream_info(SUBJECTS.stream)).config
    assert (config.max_bytes, config.max_age) == (2**23, 60)
    assert again.identity == log.identity


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"metadata": None}, "exists but was not made by Vertumnus: its metadata lacks vertumnus-log"),
        ({"allow_atomic": False}, "lacks allow_atomic"),
        ({"subjects": ["vertumnus.test.events.control"]}, r"holds \['vertumnus.test.events.control'\] instead of"),
    ],
)
async def test_a_stream_that_cannot_hold_the_log_is_refused_by_name(
    nats: NatsClient, changes: dict[str, object], complaint: str
) -> None:
    config = StreamConfig(
        name=SUBJECTS.stream,
        subjects=[SUBJECTS.all_events],
        storage="file",  # type: ignore[arg-type]
        allow_atomic=True,
        metadata={IDENTITY_KEY: "x"},
    )
    await (await nats.link()).client.jetstream().add_stream(config.evolve(**changes))
    with pytest.raises(ServerUnfit, match=f"stream {SUBJECTS.stream} {complaint}"):
        await nats.log()


async def test_a_server_without_room_for_the_stream_is_refused_in_its_words(nats: NatsClient) -> None:
    settings = ServiceSettings(stream_bytes_max=2**50)
    with pytest.raises(ServerUnfit, match="insufficient storage resources"):
        await open_log(await nats.link(), SUBJECTS, settings, CLOCK, nats.ids)


async def test_a_server_with_a_smaller_payload_than_events_need_is_refused(tmp_path: Path) -> None:
    class Narrow(EmbeddedNats):
        def _configuration(self) -> str:
            return super()._configuration().replace("max_payload: 1048576", "max_payload: 900000")

    with Narrow(tmp_path / "narrow", sync_always=False) as server:
        link = await connect(server.url, "test")
        with pytest.raises(ServerUnfit, match=r"messages of up to 900000 bytes; 1004096 are needed \(max_payload\)"):
            await require_nats(link.client)
        await link.close()


async def test_a_full_disk_is_unavailable_with_the_servers_words_and_mends(nats: NatsClient) -> None:
    """A stream that may hold no more, in a server's terms: the same answer as a full disk."""
    log = await nats.log()
    js = (await nats.link()).client.jetstream()
    config = (await js.stream_info(SUBJECTS.stream)).config
    await js.update_stream(config.evolve(discard="new", max_bytes=10_000))
    entry = Entry(SUBJECTS.control, nats.ids.next(), "x", bytes(9_000))
    assert await log.append([entry], {}) == 1
    for entries in ([entry], [entry, entry]):
        fresh = [each._replace(id=nats.ids.next()) for each in entries]
        with pytest.raises(Unavailable, match="maximum bytes exceeded"):
            await log.append(fresh, {})
    await js.update_stream(config)
    assert await log.append([entry._replace(id=nats.ids.next())], {}) == 2


async def test_no_server_is_said_within_the_limit_and_without_the_password() -> None:
    with pytest.raises(
        Unavailable, match=r"cannot connect to NATS at 127.0.0.1:1 \(no answer within 0.5 s: .*111"
    ) as error:
        await connect("nats://user:secret@127.0.0.1:1", "test", limit_s=0.5)
    assert "secret" not in str(error.value)


async def test_one_of_several_servers_is_enough(nats: NatsClient) -> None:
    link = await connect(f"nats://127.0.0.1:1, {nats.url}", "test", limit_s=5)
    assert link.client.is_connected
    await link.close()


async def test_a_refusal_is_told_as_such_however_the_server_hangs_up(nats: NatsClient) -> None:
    """Sometimes the server's reset of the connection arrives before its words are read."""
    wrong = nats.url.replace(nats.url.split(":")[2].split("@")[0], "guessed")
    for _ in range(20):
        with pytest.raises(Unavailable, match="Authorization Violation") as error:
            await connect(wrong, "test")
        assert "guessed" not in str(error.value)
