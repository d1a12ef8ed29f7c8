"""Every service as its own NATS user, at work: the rights in deploy/nats/nats.conf are enough for all that they do."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cli.embedded.services import ServiceProcess
from tests.support.pool_server import PoolServer

READY_LIMIT_S = 60.0
SERVICES = ("controller", "cachemgr", "worker", "router", "ledger")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def services(pool_server: PoolServer, record_url: str, tmp_path: Path) -> Iterator[dict[str, ServiceProcess]]:
    """The five, ready, over a modelled engine. None sees more secrets than its own."""
    common = {"PATH": os.environ["PATH"], "VERTUMNUS_NATS_URL": pool_server.url, "VERTUMNUS_COMPOSITION": "1,1"}
    own = {
        "router": {"VERTUMNUS_BLOCK_KEY_FILE": str(pool_server.secrets / "block.key")},
        "worker": {"VERTUMNUS_ENGINE": "modelled", "VERTUMNUS_PREFILL_RANKS": "2"},
        "ledger": {"VERTUMNUS_DATABASE_URL": record_url},
    }
    started: dict[str, ServiceProcess] = {}
    try:
        for name in SERVICES:
            user = {
                "VERTUMNUS_NATS_USER": name,
                "VERTUMNUS_NATS_PASSWORD_FILE": str(pool_server.secrets / f"nats.{name}"),
            }
            started[name] = ServiceProcess(
                name,
                f"services.{name}",
                env={**common, **user, **own.get(name, {})},
                port=free_port(),
                log=tmp_path / f"{name}.log",
            )
            started[name].start()
        deadline = time.monotonic() + READY_LIMIT_S
        for service in started.values():
            while not service.ready():
                assert service.exit_status() is None, service.log.read_text()
                assert time.monotonic() < deadline, f"{service.name}: {service.log.read_text()}"
                time.sleep(0.1)
        yield started
    finally:
        for service in started.values():
            service.stop()


def test_nobody_needs_a_right_it_has_not(services: dict[str, ServiceProcess]) -> None:
    body = {"model": "modelled", "prompt": list(range(1000, 1200)), "max_tokens": 3}
    for _ in range(2):
        answer = httpx.post(f"{services['router'].url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
    # The controller keeps what the stream will drop, and the cache manager scans, once a second.
    time.sleep(3)
    for service in services.values():
        assert "permissions violation" not in service.log.read_text().lower(), service.log.read_text()
        assert service.exit_status() is None, service.name
