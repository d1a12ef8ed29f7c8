"""Weights in one file or in many, how far reading them is, and that every refusal names the file."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from services.worker.engine.protocol import EngineError
from services.worker.engine.torch.checkpoint import INDEX, SINGLE, weight_files
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.load import Load
from services.worker.engine.torch.messages import Loading
from services.worker.engine.torch.model_config import read_config
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.weights import Weights
from services.worker.engine.torch.zygote import Zygote
from tests.services.worker.engine.contract import Node, prompt
from tests.support.tiny_models import write_tiny_model

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The tiny model in two files, with a third beside them that is not part of it."""
    directory = write_tiny_model(tmp_path / "sharded", "qwen3")
    tensors = load_file(directory / SINGLE)
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    for file, half in zip(SHARDS, halves, strict=True):
        save_file({name: tensors[name] for name in half}, directory / file)
    weight_map = {name: file for file, half in zip(SHARDS, halves, strict=True) for name in half}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / SINGLE).rename(directory / "consolidated.safetensors")
    return directory


def change_index(directory: Path, **weight_map: str) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] |= weight_map
    (directory / INDEX).write_text(json.dumps(index))


async def test_a_model_in_many_files_is_the_model_in_one(sharded: Path, tiny_qwen3: Path, zygote: Zygote) -> None:
    assert [file.name for file in weight_files(sharded)] == list(SHARDS)
    said = []
    for directory in (tiny_qwen3, sharded):
        settings = TorchSettings(directory, prefill_ranks=2, block_tokens=8, blocks_per_rank=16)
        node = Node(TorchEngine(settings, zygote))
        await node.engine.start()
        (group,) = await node.adopt(2)
        said.append(await node.serve(group, prompt(60), 8))
        await node.engine.close()
    assert said[0] == said[1]


def test_a_missing_file_is_named(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(EngineError, match=rf"{INDEX} names 2 files, but {SHARDS[1]} is missing"):
        weight_files(sharded)


def test_a_tensor_that_is_not_where_the_index_says_is_named(sharded: Path) -> None:
    change_index(sharded, **{f"extra.{n}.weight": SHARDS[0] for n in range(5)})
    expected = r"00001-of.*does not: extra.0.weight, extra.1.weight, extra.2.weight and 2 more are missing"
    with pytest.raises(EngineError, match=expected):
        weight_files(sharded)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable as an index"),
        ("[]", "not readable as an index"),
        ('{"weight_map": []}', "must name files of its own directory"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "must name files of its own directory"),
        ('{"weight_map": {"a": 1}}', "not readable as an index"),
        ("[" * 100_000, "not readable as an index"),
    ],
    ids=["half", "list", "no map", "another directory", "no name", "nested without end"],
)
def test_a_broken_index_is_named(sharded: Path, content: str, message: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(EngineError, match=f"{INDEX}: .*{message}"):
        weight_files(sharded)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12", "a pointer of Git LFS"),
        (b"", "not a safetensors file"),
        (b"\x02" + 7 * b"\0" + b"[]", "its header cannot be read"),
        (b"\x02" + 7 * b"\0" + b"{]", "its header cannot be read"),
        (b"\x0a" + 7 * b"\0" + b'{"a": {}} ', "its header cannot be read"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "its header cannot be read"),
    ],
    ids=["a pointer", "nothing", "list", "half", "no places", "nested without end"],
)
def test_a_file_that_is_something_else_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    write_tiny_model(tmp_path, "llama")
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(EngineError, match=f"{SINGLE}: .*{message}"):
        weight_files(tmp_path)


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[:-1])
    with pytest.raises(EngineError, match=rf"has {len(whole) - 1} bytes, but its header describes {len(whole)}; copy"):
        TorchEngine(TorchSettings(tmp_path), Zygote())


def test_reading_reports_as_it_goes(sharded: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    Weights(sharded, read_config(sharded).dtype, lambda *read: reports.append(read))
    assert [name for name, _, _ in reports] == sorted(name for name, _, _ in reports)
    read_bytes = [read for _, read, _ in reports]
    assert read_bytes == sorted(read_bytes)
    (total,) = {total for _, _, total in reports}
    assert total == sum((sharded / file).stat().st_size for file in SHARDS)
    assert 10 < len(reports) <= 100
    assert 0.97 * total < read_bytes[-1] <= total


def test_the_rank_that_is_furthest_behind_says_how_far_the_start_is() -> None:
    load = Load(2)
    with capture_logs() as logs:
        for read_bytes in (300, 600, 1_000):
            load.note(0, Loading("a", read_bytes * 10**7, 10**10))
        assert load.text == "0 % of 10.0 GB of weights are read; rank 0 is at a"
        for read_bytes in (99, 100, 190, 450):
            load.note(1, Loading("b", read_bytes * 10**7, 10**10))
    assert load.text == "45 % of 10.0 GB of weights are read; rank 1 is at b"
    assert [each["percent"] for each in logs] == [10, 45]
    small = Load(1)
    with capture_logs() as logs:
        for percent in range(0, 101, 10):
            small.note(0, Loading("a", percent * 10**6, 10**8))
    assert [each["percent"] for each in logs] == [100], "a model that is read in a second is no news before"


@pytest.fixture
async def warm(tiny_qwen3: Path, zygote: Zygote) -> TorchSettings:
    """Of two prefill ranks and a decode rank. The zygote takes its time to load torch: that is over."""
    settings = TorchSettings(tiny_qwen3, prefill_ranks=2, blocks_per_rank=4)
    first = TorchEngine(settings, zygote)
    await first.start()
    await first.close()
    return settings


async def stopped_in_the_start(engine: TorchEngine, rank: int) -> "asyncio.Task[None]":
    """At the very turn of the loop that has begun the last rank: none is ready before it is stopped."""
    starting = asyncio.create_task(engine.start())
    while len(engine._ranks._processes) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    os.kill(engine._ranks._processes[rank].pid, signal.SIGSTOP)
    return starting


async def test_a_start_that_gets_no_further_says_where_it_stopped(warm: TorchSettings, zygote: Zygote) -> None:
    engine = TorchEngine(replace(warm, start_timeout_s=2.0, hung_s=3600), zygote)
    with pytest.raises(EngineError, match=r"ranks: .*, and no progress for 2 s"):
        await (await stopped_in_the_start(engine, 2))
    assert engine.health().ranks_alive == 0


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_a_rank_that_is_stopped_in_the_start_ends_it(warm: TorchSettings, zygote: Zygote, rank: int) -> None:
    """Long before the start's limit, and whether the others wait for it, as prefill ranks do for each other, or not."""
    engine = TorchEngine(replace(warm, start_timeout_s=3600, hung_s=0.5), zygote)
    starting = await stopped_in_the_start(engine, rank)
    pid = engine._ranks._processes[rank].pid
    with pytest.raises(EngineError, match=rf"^rank {rank} \(pid {pid}\) hangs: stopped for 0.5 s$"):
        await starting
    assert engine.health().ranks_alive == 0
