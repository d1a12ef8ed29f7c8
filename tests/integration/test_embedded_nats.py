import stat
from pathlib import Path

import nats
import pytest

from cli.embedded.nats import EmbeddedNats
from cli.embedded.processes import StartFailed, is_running


async def test_messages_survive_a_crash_of_the_server(nats_server: EmbeddedNats) -> None:
    url = nats_server.url
    client = await nats.connect(url)
    stream = client.jetstream()
    await stream.add_stream(name="S", subjects=["s"])
    for number in range(100):
        await stream.publish("s", str(number).encode())
    await client.close()

    nats_server.stop(kill=True)
    nats_server.start()

    assert nats_server.url == url
    client = await nats.connect(url)
    info = await client.jetstream().stream_info("S")
    assert info.state.messages == 100
    await client.close()


async def test_only_who_knows_the_password_gets_in(nats_server: EmbeddedNats) -> None:
    address = nats_server.url.rpartition("@")[2]

    async def quiet(_: Exception) -> None:
        """The refusal is what the test wants; nats-py would log it."""

    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await nats.connect(f"nats://{address}", allow_reconnect=False, error_cb=quiet)
    for secret in ("nats.conf", "nats.password"):
        assert stat.S_IMODE((nats_server.directory / secret).stat().st_mode) == 0o600


def test_a_clean_stop_leaves_no_process(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    pid = server.pid
    assert pid is not None
    assert is_running(pid)
    server.stop()
    assert not is_running(pid)
    assert server.pid is None


def test_a_store_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "nats"
    directory.mkdir()
    (directory / "store").write_text("a file where the store should be")
    with pytest.raises(StartFailed, match=r"nats-server .*(?s:.)*store"):
        EmbeddedNats(directory).start()
