"""Several processes find together what one finds."""

import subprocess
import sys
from collections import Counter

import psutil
import pytest

from replay.beginnings import registration
from replay.findings import Findings
from replay.parts import JOBS_OF_ITSELF, WORTH_EVENTS, jobs_for, parts
from replay.verification import verify
from replay.verifying import EVERYTHING, LogVerifier
from services.router import decider as router
from shared.contracts.ids import Source
from tests.replay.conftest import arrivals
from tests.replay.lagging_world import World
from tests.replay.test_verifying import second_best, verified
from tests.services.ledger.record_writer import RecordWriter


def faulty_world() -> World:
    """Some of its placements are not the router's."""
    world = World(2)
    world.run(300)
    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(router, "choose", second_best(router.choose))
        world.run(60)
    world.run(200)
    return world


@pytest.mark.parametrize("jobs", [1, 2, 3, 5])
def test_every_decision_is_in_exactly_one_part(jobs: int) -> None:
    world = faulty_world()
    begun = [found for each in world.log if (found := registration(each)) is not None]
    shares = []
    for part in parts(jobs):
        shares.append(Findings())
        verifier = LogVerifier("log", begun, EVERYTHING, shares[-1], part=part)
        for each in world.log:
            verifier.fold(each)
        verifier.end()
        verifier.check()
    assert len(shares) == jobs
    assert all(each.checked.total() for each in shares[-2:])
    together, whole = Findings.together(shares), Findings.together([verified(world.log)])
    assert whole.differences
    assert together == whole


def test_who_did_not_say_how_it_began_is_counted_once() -> None:
    world = World(5)
    world.run(150)
    shares = [Findings() for _ in range(4)]
    for part, findings in zip(parts(4), shares, strict=True):
        verifier = LogVerifier("log", [], EVERYTHING, findings, part=part)
        for each in world.log:
            verifier.fold(each)
        verifier.end()
    assert Findings.together(shares) == Findings.together([verified_without_beginnings(world)])


def verified_without_beginnings(world: World) -> Findings:
    findings = Findings()
    verifier = LogVerifier("log", [], EVERYTHING, findings)
    for each in world.log:
        verifier.fold(each)
    verifier.end()
    return findings


async def test_processes_share_one_view_of_the_database(writer: RecordWriter) -> None:
    world = faulty_world()
    await writer.write(arrivals(world.log))
    one, three = [await verify(writer.url, jobs=jobs) for jobs in (1, 3)]
    assert one == three
    assert one.findings.differences
    assert not three.clean


def test_a_small_record_is_not_worth_another_process() -> None:
    assert jobs_for(WORTH_EVENTS - 1) == 1
    assert 1 <= jobs_for(10**9) <= JOBS_OF_ITSELF
    assert Counter(part.has(Source(f"r{n}")) for part in parts(8) for n in range(50))[True] == 50


def test_processes_of_a_command_that_was_killed_end() -> None:
    """They hold their own end of the queue of work, so nothing else would tell them."""
    script = (
        "import os, sys, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from multiprocessing import get_context\n"
        "from replay.verification import end_with_parent\n"
        "if __name__ == '__main__':\n"
        "    pool = ProcessPoolExecutor(1, get_context('spawn'), end_with_parent)\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    time.sleep(3600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        child = psutil.Process(int(command.stdout.readline()))
        command.kill()
    child.wait(timeout=60)
