"""What operators type, against a real controller."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.embedded.nats import EmbeddedNats
from shared.contracts.events import Frozen, LeadershipTaken, ParametersChanged
from tests.support.replica import Replica, eventually, witness


@pytest.fixture
def controller(nats_server: EmbeddedNats, tmp_path: Path) -> Iterator[Replica]:
    replica = Replica("controller", nats_server, tmp_path)
    yield replica
    replica.stop(kill=True)


def command(controller: Replica, *arguments: str) -> tuple[int, str, str]:
    """(status, standard output, standard error) of `vertumnus …`."""
    said = subprocess.run(
        [sys.executable, "-c", "from cli.main import app; app()", *arguments],
        env={**os.environ, "VERTUMNUS_CONTROLLER_URL": controller.url, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return said.returncode, said.stdout, said.stderr


async def test_parameters_are_shown_changed_and_refused_by_name(nats_server: EmbeddedNats, controller: Replica) -> None:
    async with witness(nats_server) as seeing:
        controller.start()
        await eventually(lambda: seeing.all(LeadershipTaken))

        async def vertumnus(*arguments: str) -> tuple[int, str, str]:
            return await asyncio.to_thread(command, controller, *arguments)

        status, said, _ = await vertumnus("params", "set", "lam=0.05", "cache_policy=regret", "--by", "ann")
        assert (status, said.strip()) == (0, "parameters-changed")
        [changed] = seeing.all(ParametersChanged)
        assert (changed.changes, changed.asked_by) == ({"lam": 0.05, "cache_policy": "regret"}, "ann")
        status, said, _ = await vertumnus("params", "get", "lam", "beta", "--json")
        assert (status, json.loads(said)) == (0, {"lam": 0.05, "beta": 3.0})
        status, said, _ = await vertumnus("params", "get")
        assert status == 0
        assert "regret" in said
        assert "price of extra GPU-seconds" in said
        for wrong, complaint in (
            (("set", "lam=99"), "changes.lam: Input should be less than or equal to 10"),
            (("set", "lam"), "lam: write it as name=value"),
            (("set", "lam=1", "lam=2"), "lam is given twice"),
            (("get", "lamb"), "lamb: not among"),
        ):
            status, _, error = await vertumnus("params", *wrong)
            assert status == 2, error
            assert complaint in " ".join(error.replace("│", " ").split())
        assert len(seeing.all(ParametersChanged)) == 1
        status, said, _ = await vertumnus("freeze", "--reason", "incident 7")
        assert (status, said.strip()) == (0, "frozen")
        assert [each.reason for each in seeing.all(Frozen)] == ["incident 7"]
