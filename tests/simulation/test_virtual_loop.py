"""An event loop whose time passes by itself."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.loop import StoodStill, run

ROOT = Path(__file__).resolve().parents[2]


def test_time_jumps_to_the_next_timer() -> None:
    told: list[tuple[float, str]] = []

    async def sleeper(seconds: float, name: str) -> None:
        await asyncio.sleep(seconds)
        told.append((asyncio.get_running_loop().time(), name))

    async def main() -> None:
        await asyncio.gather(sleeper(86_400, "a day"), sleeper(0.5, "a moment"), sleeper(3, "a while"))

    run(main())
    assert told == [(0.5, "a moment"), (3, "a while"), (86_400, "a day")]


def test_limits_are_in_virtual_seconds() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1_000):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == 1_000


def test_waiting_for_nothing_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StoodStill):
        run(main())


def test_an_instant_is_over_before_time_goes_on() -> None:
    told: list[str] = []

    async def main() -> None:
        for _ in range(2):
            for _ in range(3):
                await asyncio.sleep(0)
                told.append("turn")
            await asyncio.sleep(1)

    run(main(), lambda: told.append("settled"))
    assert told == [*["turn"] * 3, "settled"] * 2


def test_what_is_left_is_cancelled_even_if_it_waits_again() -> None:
    ended: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("once")
            await asyncio.Event().wait()

    async def main() -> "asyncio.Task[None]":
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(1)
        return task

    assert run(main()).cancelled()
    assert ended == ["once"]


def test_sets_of_tasks_have_the_order_of_their_creation() -> None:
    async def main() -> list[str]:
        tasks = {asyncio.create_task(asyncio.sleep(1), name=f"{number}") for number in range(5)}
        names = [task.get_name() for task in tasks]
        await asyncio.wait(tasks)
        return names

    assert run(main()) == ["0", "1", "2", "3", "4"]


def test_a_seed_is_the_same_run_in_every_process() -> None:
    """Byte for byte, under other hashes of strings and behind other runs."""
    program = (
        "import sys\nfrom simulation.faults.running import judge\nfrom simulation.faults.scenario import draw\n"
        "print([judge(draw(int(seed))).digest for seed in sys.argv[1:]][-8:])"
    )

    def digests(hash_seed: str, seeds: range) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", program, *map(str, seeds)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT).stdout

    assert digests("1", range(21, 29)) == digests("2", range(15, 29))
