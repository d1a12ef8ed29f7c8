"""How fast the record is folded, and decisions are made again: `python -m bench.replay`. Pure, in one process.

The log is that of a simulated pool (`simulation/policies`), which is the deciders' own; what is measured begins with the
published bytes, as they come from Postgres. Rates are of processor time, which is what remains comparable on a machine that
has other things to do.
"""

import argparse
import json
import time
from collections.abc import Callable
from random import Random
from typing import Any
from uuid import UUID

from replay.beginnings import registration
from replay.findings import Findings
from replay.garbage import seldom_collected
from replay.history import published
from replay.parts import Part
from replay.verifying import EVERYTHING, LogVerifier
from services.ledger.patches import Place
from services.ledger.readmodels import ReadModels, evolve
from services.ledger.records import Arrival, record
from shared.contracts.codec import encode
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import CacheLeadershipTaken, RequestAssigned, RouterRegistered
from shared.model.cost import Coefficients
from simulation.policies.arrivals import requests_of
from simulation.policies.run import Simulation
from simulation.policies.setup import Setup
from simulation.workloads.generating import SHAPES, Phase, generated

COST = Coefficients(version="bench", d=1e-3, a=1e-5, b=1e-6, c=4e-5, alpha=1e-9, g=1e-4)

PLACEMENTS = Part(controller=False, cache_manager=False, inputs=False)

REQUESTS_PER_S = 2.0
"""Sixteen GPUs are busy and keep up."""


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description="Events folded and placements verified a second.")
    parser.add_argument("--requests", type=int, default=4_000, help="about six events each")
    parser.add_argument("--routers", type=int, default=1, help="each has a state of its own")
    asked = parser.parse_args()
    print(json.dumps(measure(life(pool(asked.routers), asked.requests)), indent=2))


def pool(routers: int, **more: Any) -> Setup:
    """Two nodes of eight ranks and a cache manager."""
    return Setup(((1, 1, 2, 4),) * 2, COST, routers=routers, cache_manager=True, **more)


def life(setup: Setup, requests: int) -> list[Arrival]:
    """Some `requests` of a conversation load, as the stream of that pool has them. Equal setups tell equal lives."""
    log = list[Arrival]()

    def listen(stored: Stored) -> None:
        seq, request = stored.stream_seq, getattr(stored.data, "request", None)
        own = {"id": UUID(int=seq), "correlation": request, "data": _begun(stored)}
        log.append(Arrival(seq, encode(stored.event.model_copy(update=own))))

    rows = generated([Phase(requests / REQUESTS_PER_S, REQUESTS_PER_S, SHAPES["conversation"])], Random(1))
    Simulation(setup, listen).run(requests_of(rows, setup.block_tokens))
    return log


def _begun(stored: Stored) -> EventData:
    """A process of a simulation has its cost model from the setup, and does not say so."""
    if isinstance(stored.data, RouterRegistered):
        return stored.data.model_copy(update={"coefficients": COST.model_dump(), "seen_seq": stored.stream_seq - 1})
    if isinstance(stored.data, CacheLeadershipTaken):
        return stored.data.model_copy(update={"coefficients": COST.model_dump()})
    return stored.data


def measure(arrivals: list[Arrival]) -> dict[str, float]:
    """Events and placements a second. `placements_alone`: out of the bytes, derived on the routers' folded states, with nothing
    else along."""
    log, size = [published("bench", each) for each in arrivals], sum(len(each.raw) for each in arrivals)
    stories = [each for each in log if each is not None]
    findings, placed = Findings(), Findings()
    begun = [found for each in stories if (found := registration(each))]
    verifier = LogVerifier("bench", begun, EVERYTHING, findings)
    placing = LogVerifier("bench", begun, EVERYTHING, placed, part=PLACEMENTS)

    def decode() -> None:
        for each in arrivals:
            record(each)

    def fold() -> None:
        models = ReadModels()
        for each in arrivals:
            evolve(models, "bench", Place(1, each.stream_seq), record(each))
            models.take()

    def verify() -> None:
        for each in stories:
            verifier.fold(each)
        verifier.end()

    def place() -> None:
        for each in arrivals:
            if (story := published("bench", each)) is not None:
                placing.fold(story)

    with seldom_collected():
        decode_s, fold_s, verify_s, place_s = (processor_s(each) for each in (decode, fold, verify, place))
    placements = findings.checked[RequestAssigned.TYPE]
    return {
        "events": len(log),
        "bytes_per_event": round(size / len(log)),
        "decoded_events_per_s": round(len(log) / decode_s),
        "folded_events_per_s": round(len(log) / fold_s),
        "verified_events_per_s": round(len(log) / verify_s),
        "verified_placements_per_s": round(placements / verify_s),
        "placements_alone_per_s": round(placed.checked[RequestAssigned.TYPE] / place_s),
        "decisions_that_differ": findings.differing.total() + placed.differing.total(),
    }


def processor_s(work: Callable[[], None]) -> float:
    """Seconds of this process's processor time."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


if __name__ == "__main__":
    main()
