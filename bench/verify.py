"""How many placements a second `vertumnus verify` derives from folded states, read from Postgres: `python -m bench.verify`.

The record is that of a simulated pool. Rates are by the clock on the wall, reading and decoding included, for each number of
processes; how much the second and third bring is for the machine's processors to say.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.explain import write
from bench.replay import life, pool
from cli.embedded.postgres import EmbeddedPostgres
from migrations.steps import upgrade
from replay.verification import Verification, verify
from shared.contracts.events import RequestAssigned


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description="Placements verified a second.")
    parser.add_argument("--requests", type=int, default=8_000, help="about seven events each")
    parser.add_argument("--routers", type=int, default=1, help="each has a state of its own")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 3], help="processes")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vertumnus-bench-") as name:
        directory = Path(name)
        directory.chmod(0o711)
        with EmbeddedPostgres(directory / "postgres", durable=False) as postgres:
            upgrade(postgres.url())
            print(json.dumps(asyncio.run(measure(postgres.url(), asked.requests, asked.routers, asked.jobs)), indent=2))


async def measure(url: str, requests: int, routers: int, jobs: list[int]) -> dict[str, Any]:
    """Placements a second by number of processes."""
    events = await write(url, life(pool(routers), requests))
    rates, differing = {}, 0
    for number in jobs:
        begun = time.perf_counter()
        found = await verify(url, jobs=number)
        rates[str(number)] = round(placements(found) / (time.perf_counter() - begun))
        differing += found.findings.differing.total()
    return {
        "events": events,
        "placements": placements(found),
        "placements_per_s_by_jobs": rates,
        "decisions_that_differ": differing,
        "load_at_the_end": os.getloadavg()[0],
    }


def placements(found: Verification) -> int:
    return found.findings.checked[RequestAssigned.TYPE]


if __name__ == "__main__":
    main()
