"""How many events a second the ledger copies into Postgres, read models included: `python -m bench.ledger`.

A real NATS, a real Postgres that syncs every commit, and one ledger process, on this (Linux) machine. The stream is filled
first, so that the publisher takes nothing from the measurement: this is the rate at which a ledger catches up.

Then events are published at a steady rate while the ledger copies (`--rate`, `--seconds`), in the mix of a real run: one in
eight stores blocks, 188 in the mean. What counts is that the lag stays where it is. The publisher is on the same machine.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from itertools import islice
from pathlib import Path

import asyncpg

from bench.ledger_publisher import Publisher, pieces
from bench.ledger_traffic import REAL_PROMPT_TOKENS, Traffic
from cli.embedded.loopback import answers_ok, free_port
from cli.embedded.nats import EmbeddedNats
from cli.embedded.postgres import EmbeddedPostgres
from cli.embedded.services import ServiceProcess
from migrations.steps import upgrade
from services.ledger.database import driver_url
from shared.runtime.service import open_runtime
from shared.runtime.settings import ServiceSettings

READY_LIMIT_S = 60.0


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description="Events a second into the record.")
    parser.add_argument("--requests", type=int, default=5_000, help="about 7.6 events each")
    parser.add_argument("--rate", type=float, default=3_000, help="events a second, published while the ledger copies")
    parser.add_argument("--seconds", type=float, default=20, help="of that")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vertumnus-bench-") as name:
        directory = Path(name)
        directory.chmod(0o711)
        with (
            EmbeddedNats(directory / "nats", sync_always=False) as nats,
            EmbeddedPostgres(directory / "postgres") as postgres,
        ):
            upgrade(postgres.url())
            env = {"VERTUMNUS_NATS_URL": nats.url, "VERTUMNUS_DATABASE_URL": postgres.url()}
            ledger = ServiceProcess(
                "ledger", "services.ledger", env=env, port=free_port(), log=directory / "ledger.log"
            )
            try:
                found = asyncio.run(measure(nats, postgres, ledger, asked.requests))
                found |= asyncio.run(sustained(nats, postgres, asked.rate, asked.seconds))
                print(json.dumps(found, indent=2))
            finally:
                ledger.stop(kill=True)


async def measure(
    nats: EmbeddedNats, postgres: EmbeddedPostgres, ledger: ServiceProcess, requests: int
) -> dict[str, float]:
    """Idle memory, then the rate between the first and the last commit of the backlog."""
    start(ledger)
    idle_mib = memory_mib(ledger)
    ledger.stop()
    events, size, last_seq = await fill(nats, requests)
    connection = await asyncpg.connect(driver_url(postgres.url()))
    ledger.start()
    first_seq = first_s = 0.0
    peak_mib = 0.0
    while (copied := await connection.fetchval("SELECT max(stream_seq) FROM checkpoints")) < last_seq:
        if copied and not first_seq:
            first_seq, first_s = copied, time.perf_counter()
        peak_mib = max(peak_mib, memory_mib(ledger))
        await asyncio.sleep(0.02)
    seconds = time.perf_counter() - first_s
    cpu_s = processor_s(ledger)
    await connection.close()
    return {
        "events": events,
        "bytes_per_event": round(size / events),
        "events_per_s": round((last_seq - first_seq) / seconds),
        "ledger_cpu_us_per_event": round(cpu_s / events * 1e6),
        "idle_rss_mib": round(idle_mib),
        "peak_rss_mib": round(peak_mib),
    }


async def fill(nats: EmbeddedNats, requests: int) -> tuple[int, int, int]:
    """Events published, their bytes, and the last sequence."""
    async with open_runtime(ServiceSettings(nats_url=nats.url, log_level="error"), "bench") as runtime:
        publisher, size = Publisher(runtime, "bench"), 0
        for piece in pieces(Traffic(seed=1), requests):
            entries = publisher.sealed(piece)
            size += sum(len(entry.payload) for entry in entries)
            await publisher.append(entries)
        return publisher.events, size, publisher.last_seq


async def sustained(nats: EmbeddedNats, postgres: EmbeddedPostgres, rate: float, seconds: float) -> dict[str, float]:
    """Rates published and copied, and the lag in events, of the second half of that time."""
    connection = await asyncpg.connect(driver_url(postgres.url()))
    lags = list[int]()
    async with open_runtime(ServiceSettings(nats_url=nats.url, log_level="error"), "bench") as runtime:
        publisher, begun = Publisher(runtime, "steady"), time.perf_counter()
        for piece in islice(pieces(Traffic(2, "steady", REAL_PROMPT_TOKENS), 10**9), 1, None):
            await publisher.append(publisher.sealed(piece))
            ahead_s = publisher.events / rate - (time.perf_counter() - begun)
            await asyncio.sleep(max(ahead_s, 0))
            if (passed_s := time.perf_counter() - begun) > seconds / 2:
                lags.append(publisher.last_seq - await connection.fetchval("SELECT max(stream_seq) FROM checkpoints"))
            if passed_s > seconds:
                break
    await connection.close()
    return {
        "steady_events_per_s": round(publisher.events / passed_s),
        "lag_events_p50": sorted(lags)[len(lags) // 2],
        "lag_events_at_the_middle": lags[0],
        "lag_events_at_the_end": lags[-1],
        "lag_events_max": max(lags),
        "load_at_the_end": os.getloadavg()[0],
    }


def start(ledger: ServiceProcess) -> None:
    ledger.start()
    deadline = time.monotonic() + READY_LIMIT_S
    while not answers_ok(ledger.port, "/readyz"):
        assert time.monotonic() < deadline, ledger.log.read_text()
        time.sleep(0.05)


def memory_mib(ledger: ServiceProcess) -> float:
    status = Path(f"/proc/{ledger.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def processor_s(ledger: ServiceProcess) -> float:
    """User and system time since the process began."""
    fields = Path(f"/proc/{ledger.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
