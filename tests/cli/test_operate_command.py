"""What operators type, against a real controller."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.embedded.nats import EmbeddedNats
from cli.main import app
from shared.contracts.commands import NodeLoad, encode_message
from shared.contracts.events import (
    CompositionPinned,
    Frozen,
    LeadershipTaken,
    ParametersChanged,
    ReconfigurationPlanned,
)
from shared.contracts.ids import NodeId
from shared.model.parameters import RECOMMENDED
from tests.support.replica import Replica, Witness, eventually, witness
from tests.support.story import adopted, committed, registered


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
        await eventually(controller.ready)

        async def vertumnus(*arguments: str) -> tuple[int, str, str]:
            return await asyncio.to_thread(command, controller, *arguments)

        status, said, unheeded = await vertumnus("params", "set", "lam=0.05", "cache_policy=lru", "--by", "ann")
        assert (status, said.strip()) == (0, "parameters-changed")
        assert unheeded.strip() == "lam: nothing reads it now; it is read with placement_policy=paper"
        opened, changed = seeing.all(ParametersChanged)
        assert (opened.changes, opened.asked_by) == (dict(RECOMMENDED), "new pool")
        assert (changed.changes, changed.asked_by) == ({"lam": 0.05, "cache_policy": "lru"}, "ann")
        status, said, _ = await vertumnus("params", "get", "lam", "beta", "--json")
        assert (status, json.loads(said)) == (0, {"lam": 0.05, "beta": 3.0})
        status, said, _ = await vertumnus("params", "get")
        assert status == 0
        assert "price of extra GPU-seconds" in said
        assert {"version", "true", "[]"} <= set(said.replace("│", " ").split()), "values as `set` takes them"
        assert "New pools begin with other policies" in said
        assert said.rstrip().endswith("params set cache_policy=regret"), said
        for wrong, complaint in (
            (("set", "lam=99"), "changes.lam: Input should be less than or equal to 10"),
            (("set", "lam"), "lam: write it as name=value"),
            (("set", "lam=1", "lam=2"), "lam is given twice"),
            (("get", "lamb"), "lamb: not among"),
        ):
            status, _, error = await vertumnus("params", *wrong)
            assert status == 2, error
            assert complaint in " ".join(error.replace("│", " ").split())
        assert len(seeing.all(ParametersChanged)) == 2
        status, said, _ = await vertumnus("freeze", "--reason", "incident 7")
        assert (status, said.strip()) == (0, "frozen")
        assert [each.reason for each in seeing.all(Frozen)] == ["incident 7"]


async def beat(seeing: Witness, *nodes: str) -> None:
    """Heartbeats of nodes that have no agent, until cancelled."""
    while True:
        for node in map(NodeId, nodes):
            load = NodeLoad(node=node, incarnation=1, epoch=1, queued={}, running={}, used_blocks=0, free_blocks=0)
            await seeing.runtime.bus.publish(seeing.runtime.subjects.load(node), encode_message(load))
        await asyncio.sleep(0.5)


async def test_nodes_are_pinned_moved_and_drained_by_name(
    nats_server: EmbeddedNats, controller: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERTUMNUS_CONTROLLER_URL", controller.url)

    async def vertumnus(*arguments: str) -> tuple[int, str]:
        said = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        return said.exit_code, " ".join(said.output.replace("│", " ").split())

    async with witness(nats_server) as seeing:
        beats = asyncio.create_task(beat(seeing, "n0", "n1"))
        for node in ("n0", "n1"):
            await seeing.tell(registered(node), *adopted(node), sender=node)
            await seeing.tell(committed(node), sender="controller")
        controller.start()
        await eventually(lambda: seeing.all(LeadershipTaken))
        await eventually(controller.ready)
        assert await vertumnus("pin", "n0", "--by", "ann", "--reason", "a test") == (0, "composition-pinned")
        assert await vertumnus("pin", "n0") == (0, "that holds already")
        assert await vertumnus("unpin", "n0") == (0, "composition-unpinned")
        assert await vertumnus("reconfigure", "n0", "2,2,4", "--by", "ann") == (0, "reconfiguration-planned")
        assert await vertumnus("drain", "n1") == (0, "cordoned, reconfiguration-planned")
        refused = {
            ("reconfigure", "n0", "1,2,1,4"): "a degree-2 worker cannot start at rank 1",
            ("reconfigure", "nx", "8"): "reconfigure: node: 'nx' is not one of ['n0', 'n1']",
            ("drain", "nx"): "drain: node: 'nx' is not one of",
        }
        for words, why in refused.items():
            status, said = await vertumnus(*words)
            assert status == 2, said
            assert why in said
        moved, drained = seeing.all(ReconfigurationPlanned)
        assert (moved.policy, moved.asked_by, moved.new_composition) == ("operator", "ann", (2, 2, 4))
        assert (drained.node, drained.new_composition, len(drained.retiring)) == ("n1", (4, 4), 2)
        assert [each.reason for each in seeing.all(CompositionPinned)] == ["a test"]
        beats.cancel()


async def test_a_pool_of_an_older_version_keeps_its_policies_and_says_so(
    nats_server: EmbeddedNats, controller: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERTUMNUS_CONTROLLER_URL", controller.url)

    async def params(*arguments: str) -> str:
        said = await asyncio.to_thread(CliRunner().invoke, app, ["params", *arguments])
        assert said.exit_code == 0, said.output
        return said.output

    async with witness(nats_server) as seeing:
        await seeing.tell(LeadershipTaken(leader="controller-0-0000", term=1), sender="controller")
        controller.start()
        await eventually(lambda: len(seeing.all(LeadershipTaken)) == 2)
        await eventually(controller.ready)
        said = await params("get")
        assert "This pool is older than the policies that new ones begin with, and runs on the paper's." in said
        switch = said.strip().splitlines()[-1].partition(" params ")[2].split()
        assert switch[1:] == [f"{name}={value}" for name, value in RECOMMENDED.items()]
        assert not seeing.all(ParametersChanged)
        assert await params(*switch) == "parameters-changed\n"
        assert "params set" not in await params("get")
