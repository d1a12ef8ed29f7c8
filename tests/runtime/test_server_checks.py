import json

import nats
import pytest

from cli.embedded.nats import EmbeddedNats
from shared.runtime.clock import SystemClock
from shared.runtime.ports import Unavailable
from shared.runtime.server_checks import (
    NatsServer,
    ServerUnfit,
    api_level_in,
    inspect_nats,
    refuse_unfit,
)

RECORDED = {
    "2.9.10": '{"type":"io.nats.jetstream.api.v1.account_info_response","limits":{},"api":{"total":0,"errors":0}}',
    "2.11.11": '{"type":"io.nats.jetstream.api.v1.account_info_response","api":{"level":1,"total":0,"errors":0}}',
    "2.12.8": '{"type":"io.nats.jetstream.api.v1.account_info_response","api":{"level":3,"total":0,"errors":0}}',
}
NO_JETSTREAM = '{"error":{"code":503,"err_code":10039,"description":"JetStream not enabled for account"}}'


@pytest.mark.parametrize("version", RECORDED)
def test_servers_that_are_too_old_are_refused_by_name(version: str) -> None:
    level = api_level_in(json.loads(RECORDED[version]))
    with pytest.raises(ServerUnfit) as refusal:
        refuse_unfit(NatsServer("10.0.0.1:7000", version, level, 1024**2))
    assert f"NATS server {version} at 10.0.0.1:7000 has JetStream API level {level}" in str(refusal.value)
    assert "2.14" in str(refusal.value)


def test_a_server_without_jetstream_is_refused() -> None:
    server = NatsServer("10.0.0.1:7000", "2.15.1", api_level_in(json.loads(NO_JETSTREAM)), 1024**2)
    with pytest.raises(ServerUnfit, match="no JetStream"):
        refuse_unfit(server)


def test_a_payload_limit_too_small_for_events_is_refused() -> None:
    with pytest.raises(ServerUnfit, match="up to 65536 bytes; 1004096 are needed"):
        refuse_unfit(NatsServer("10.0.0.1:7000", "2.15.1", 5, 65536))


async def test_the_pinned_server_is_fit_and_the_probe_leaves_nothing(nats_server: EmbeddedNats) -> None:
    server, probe = await inspect_nats(nats_server.url, SystemClock())
    assert server.version == "2.15.1"
    assert server.api_level == 5
    assert probe.atomic_batches
    assert abs(probe.clock_skew_s) < 60
    client = await nats.connect(nats_server.url)
    assert await client.jetstream().streams_info() == []
    await client.close()


async def test_a_refused_password_is_said_and_not_repeated(nats_server: EmbeddedNats) -> None:
    with pytest.raises(Unavailable, match=r"(?i)authorization") as refusal:
        await inspect_nats(nats_server.url.replace("vertumnus:", "vertumnus:wrong"), SystemClock())
    assert "wrong" not in str(refusal.value)
