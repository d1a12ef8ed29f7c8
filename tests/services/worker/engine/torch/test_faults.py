"""What breaks, and what then holds: whoever waits hears of it at once, and nothing is left behind."""

import asyncio
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.worker.engine.protocol import Cancelled, EngineDied, EngineError, PrefillStep, Sampling
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from tests.services.worker.engine.contract import Node, prompt
from tests.support.tiny_models import write_tiny_model

ROOT = Path(__file__).parents[5]


def settings(model_dir: Path, **changes: object) -> TorchSettings:
    return TorchSettings(model_dir, **({"prefill_ranks": 4, "block_tokens": 8, "blocks_per_rank": 16} | changes))  # type: ignore[arg-type]


def pids(node: Node) -> list[int]:
    ranks = node.engine._ranks  # type: ignore[attr-defined]
    return [rank.pid for rank in (*ranks.prefill, *ranks.decode)]


def is_alive(pid: int) -> bool:
    """A zombie that its reaper has not got to yet is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def all_gone(processes: list[int], within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(is_alive(pid) for pid in processes):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


@pytest.fixture
async def node(
    tiny_qwen3: Path, zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Node]:
    # Ranks meet in memory: a disk that is full or read-only is in nobody's way, and a killed agent leaves nothing there.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    engine = TorchEngine(
        settings(tiny_qwen3, hung_s=600, step_timeout_s=3600, token_timeout_s=3600, sequences_per_decode_rank=2), zygote
    )
    await engine.start()
    yield Node(engine)
    await engine.close()


async def test_a_rank_killed_in_a_prefill_ends_every_wait_and_is_the_one_that_is_named(node: Node) -> None:
    left, right = await node.adopt(2, 2)
    os.kill(pids(node)[1], signal.SIGSTOP)  # its peer now waits in a collective, and fails there when it is gone
    waits = [
        asyncio.create_task(node.prefill(left, node.item(prompt(100)))),
        asyncio.create_task(node.engine.wait_died()),
    ]
    await node.prefill(right, node.item(prompt(50, seed=1)))
    await asyncio.sleep(0.2)
    assert not any(wait.done() for wait in waits)
    processes = pids(node)
    os.kill(processes[1], signal.SIGKILL)
    with pytest.raises(EngineDied, match=rf"^rank 1 \(pid {processes[1]}\) ended$"):
        await waits[0]
    assert await waits[1] == f"rank 1 (pid {processes[1]}) ended"
    assert await all_gone(processes)
    assert not node.engine.health().ok
    with pytest.raises(EngineDied):
        await node.prefill(right, node.item(prompt(50)))


async def test_a_killed_idle_rank_is_noticed(node: Node) -> None:
    await node.adopt(4)
    os.kill(pids(node)[2], signal.SIGKILL)
    async with asyncio.timeout(60):
        assert "rank 2" in await node.engine.wait_died()


async def test_a_killed_decode_rank_ends_hand_offs_and_streams(node: Node) -> None:
    (group,) = await node.adopt(4)
    items = [node.item(prompt(20, seed)) for seed in range(3)]
    firsts = [(await node.prefill(group, item)).first_token.token for item in items]
    for item in items[:2]:
        await node.engine.hand_off(item.request)
    os.kill(pids(node)[-1], signal.SIGSTOP)
    waits = [
        asyncio.create_task(node.decode(items[0].request, firsts[0], 100)),
        asyncio.create_task(node.engine.hand_off(items[2].request)),  # waits for room
    ]
    await asyncio.sleep(0.1)
    os.kill(pids(node)[-1], signal.SIGKILL)
    async with asyncio.timeout(60):
        for wait in waits:
            with pytest.raises(EngineDied):
                await wait


async def test_a_rank_that_says_nothing_for_too_long_counts_as_dead(tiny_qwen3: Path, zygote: Zygote) -> None:
    node = Node(TorchEngine(settings(tiny_qwen3, hung_s=600, step_timeout_s=1.0), zygote))
    await node.engine.start()
    (group,) = await node.adopt(4)
    processes = pids(node)
    os.kill(processes[0], signal.SIGSTOP)
    with pytest.raises(EngineDied, match="hangs: no answer for 1 s"):
        await node.prefill(group, node.item(prompt(100)))
    assert "hangs" in node.engine.health().detail
    assert await all_gone(processes)
    await node.engine.close()


async def test_the_rank_that_its_group_waits_for_is_named(tiny_qwen3: Path, zygote: Zygote) -> None:
    """The others of the group are asleep in a collective, and those of other groups go on."""
    node = Node(TorchEngine(settings(tiny_qwen3, hung_s=0.5), zygote))
    await node.engine.start()
    left, right = await node.adopt(2, 2)
    processes = pids(node)
    os.kill(processes[1], signal.SIGSTOP)
    hung = asyncio.create_task(node.prefill(left, node.item(prompt(100))))
    seed = 0
    while not hung.done():
        seed += 1
        with suppress(EngineDied):
            await node.serve(right, prompt(100, seed), 2)
        await asyncio.sleep(0)  # a dead engine refuses without a turn for anybody else
    with pytest.raises(EngineDied, match=rf"^rank 1 \(pid {processes[1]}\) hangs: stopped for 0.5 s$"):
        await hung
    assert "rank 1" in await node.engine.wait_died()
    await node.engine.close()


async def test_a_hung_decode_rank_counts_as_dead(tiny_qwen3: Path, zygote: Zygote) -> None:
    node = Node(TorchEngine(settings(tiny_qwen3, hung_s=0.5), zygote))
    await node.engine.start()
    (group,) = await node.adopt(4)
    item = node.item(prompt(20))
    first = (await node.prefill(group, item)).first_token.token
    await node.engine.hand_off(item.request)
    os.kill(pids(node)[-1], signal.SIGSTOP)
    with pytest.raises(EngineDied, match=r"^rank 4 .* hangs: stopped"):
        await node.decode(item.request, first, 100)
    await node.engine.close()


async def test_idle_time_is_no_hang_and_costs_no_cpu(tiny_qwen3: Path, zygote: Zygote) -> None:
    node = Node(TorchEngine(settings(tiny_qwen3, hung_s=0.5, step_timeout_s=1.0, token_timeout_s=1.0), zygote))
    await node.engine.start()
    await node.adopt(2, 2)
    before = [cpu_ticks(pid) for pid in pids(node)]
    await asyncio.sleep(1.5)  # longer than step_timeout_s
    assert node.engine.health().ok
    spent = [cpu_ticks(pid) - then for pid, then in zip(pids(node), before, strict=True)]
    assert max(spent) < 15, "a rank that spins spends 150"
    await node.engine.close()


def cpu_ticks(pid: int) -> int:
    """User and system time, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


async def test_a_node_restarts_after_a_kill(node: Node, tiny_qwen3: Path, zygote: Zygote) -> None:
    await node.adopt(4)
    os.kill(pids(node)[0], signal.SIGKILL)
    await node.engine.wait_died()
    await node.engine.close()
    again = Node(TorchEngine(settings(tiny_qwen3), zygote))
    await again.engine.start()
    (group,) = await again.adopt(4)
    await again.prefill(group, again.item(prompt(50)))
    await again.engine.close()


async def test_close_leaves_nothing(node: Node) -> None:
    await node.adopt(4)
    processes, before = pids(node), shared_memory()
    await node.engine.close()
    assert not any(map(exists, processes)), "not even a zombie"
    assert shared_memory() <= before
    assert not [name for name in open_files() if "vertumnus-kv" in name]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def shared_memory() -> set[str]:
    return {file.name for file in Path("/dev/shm").iterdir()}


def open_files() -> list[str]:
    """What this process's descriptors mean; the one that lists the directory is gone by then."""
    return [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]


AGENT = """
import asyncio, sys
from pathlib import Path
import structlog
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote

async def main():
    zygote = Zygote()
    engine = TorchEngine(TorchSettings(Path(sys.argv[1]), prefill_ranks=2, block_tokens=8, blocks_per_rank=8), zygote)
    await engine.start()
    ranks = engine._ranks
    print(zygote._process.pid, *(rank.pid for rank in (*ranks.prefill, *ranks.decode)), flush=True)
    await asyncio.sleep(60)

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
asyncio.run(main())
"""


async def test_ranks_and_zygote_die_with_the_agent(tiny_qwen3: Path) -> None:
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AGENT, str(tiny_qwen3), stdout=subprocess.PIPE, cwd=ROOT
    )
    assert agent.stdout is not None
    processes = [int(pid) for pid in (await agent.stdout.readline()).split()]
    assert len(processes) == 4
    assert all(is_alive(pid) for pid in processes)
    agent.kill()
    await agent.wait()
    assert await all_gone(processes)


async def test_a_killed_zygote_takes_its_ranks_along_and_is_replaced(tiny_qwen3: Path) -> None:
    zygote = Zygote()
    node = Node(TorchEngine(settings(tiny_qwen3, prefill_ranks=2), zygote))
    await node.engine.start()
    assert zygote._process is not None
    zygote._process.kill()
    async with asyncio.timeout(60):
        await node.engine.wait_died()
    await node.engine.close()
    again = TorchEngine(settings(tiny_qwen3, prefill_ranks=2), zygote)
    await again.start()
    assert again.health().ok
    await again.close()
    zygote.close()


def test_a_zygote_that_does_not_answer_is_replaced_before_it_gives_somebody_the_wrong_rank() -> None:
    """A stopped one answers when it goes on: the rank that it forks then is nobody's."""
    zygote = Zygote()
    ours, theirs = socket.socketpair()
    os.close(zygote.spawn(theirs, [])[1])
    assert zygote._process is not None
    assert zygote._socket is not None
    silent = zygote._process.pid
    os.kill(silent, signal.SIGSTOP)
    zygote._socket.settimeout(0.1)
    with pytest.raises(EngineError, match=r"zygote: no answer .its process was stopped"):
        zygote.spawn(theirs, [])
    assert not is_alive(silent)
    other, others = socket.socketpair()
    again, pidfd = zygote.spawn(others, [])
    os.close(pidfd)
    assert Path(f"/proc/{again}/stat").read_text().split()[3] == str(zygote._process.pid), "forked by the new one"
    zygote.close()
    for each in (ours, theirs, other, others):
        each.close()


async def test_weights_that_do_not_fit_are_named_and_nothing_runs(tmp_path: Path, zygote: Zygote) -> None:
    broken = write_tiny_model(tmp_path, "llama")
    config = (broken / "config.json").read_text().replace('"intermediate_size": 192', '"intermediate_size": 200')
    (broken / "config.json").write_text(config)
    engine = TorchEngine(settings(broken), zygote)
    with pytest.raises(EngineError, match=r"mlp\.gate_proj\.weight is .*\(192, 96\).*\(200, 96\)"):
        await engine.start()
    assert engine.health().ranks_alive == 0
    with pytest.raises(EngineError):
        await engine.start()


def damaged(model: Path, directory: Path, *rows: int) -> Path:
    """A copy of the model with no numbers for these tokens' embeddings, or for all."""
    shutil.copytree(model, directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][list(rows) or slice(None)] = np.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def test_weights_that_are_no_numbers_are_refused(tiny_qwen3: Path, tmp_path: Path, zygote: Zygote) -> None:
    engine = TorchEngine(settings(damaged(tiny_qwen3, tmp_path / "damaged")), zygote)
    with pytest.raises(EngineError, match="weights: the logits of token 0 are no finite numbers"):
        await engine.start()


async def test_a_prompt_that_comes_to_no_numbers_fails_alone(tiny_qwen3: Path, tmp_path: Path, zygote: Zygote) -> None:
    """In a prefill, in a packed step by name, and in decode; the ranks go on."""
    node = Node(TorchEngine(settings(damaged(tiny_qwen3, tmp_path / "damaged", 200)), zygote))
    await node.engine.start()
    (group,) = await node.adopt(4)
    good, bad = node.item(prompt(40)), node.item(np.full(40, 200, dtype=np.uint32))
    with pytest.raises(EngineError, match=rf"^request {bad.request}: the model's logits for it are no finite numbers$"):
        await node.engine.prefill(PrefillStep(node.epoch, group, (good, bad)))
    first = (await node.prefill(group, good)).first_token.token
    await node.engine.hand_off(good.request)
    with pytest.raises(EngineError, match=rf"^request {good.request}: the model's logits"):
        await node.decode(good.request, 200, 5)
    assert (await node.serve(group, prompt(40), 3))[0] == first
    assert node.engine.health().ok
    pool = node.engine._pool  # type: ignore[attr-defined]
    node.engine.release(good.request)
    assert [pool.counts(rank)[2] for rank in range(4)] == [0] * 4
    await node.engine.close()


async def test_a_hand_off_waits_for_room_and_can_be_cancelled(node: Node) -> None:
    (group,) = await node.adopt(4)
    items = [node.item(prompt(20, seed)) for seed in range(4)]
    for item in items:
        await node.prefill(group, item)
    for item in items[:2]:
        await node.engine.hand_off(item.request)
    waiting = [asyncio.create_task(node.engine.hand_off(item.request)) for item in items[2:]]
    await asyncio.sleep(0.05)
    assert not any(wait.done() for wait in waiting)
    node.engine.cancel(items[2].request)
    with pytest.raises(Cancelled):
        await waiting[0]
    assert not waiting[1].done()
    node.engine.cancel(items[0].request)
    assert (await waiting[1]).request == items[3].request


async def test_a_cancelled_decode_says_so_and_frees_its_place(node: Node) -> None:
    (group,) = await node.adopt(4)
    for seed in range(4):
        item = node.item(prompt(20, seed))
        first = (await node.prefill(group, item)).first_token.token
        await node.engine.hand_off(item.request)
        decoding = asyncio.create_task(node.decode(item.request, first, 400))
        await asyncio.sleep(0.02)
        node.engine.cancel(item.request)
        with pytest.raises(Cancelled):
            await decoding


async def test_a_release_during_a_hand_off_takes_effect_after_it(node: Node) -> None:
    (group,) = await node.adopt(4)
    generated = await node.serve(group, prompt(100), 6)
    item = node.item(prompt(100))
    await node.prefill(group, item)
    copying = asyncio.create_task(node.engine.hand_off(item.request))
    await asyncio.sleep(0)
    node.engine.release(item.request)
    pool = node.engine._pool  # type: ignore[attr-defined]
    assert pool.reservation(item.request) is not None
    await copying
    await asyncio.sleep(0)
    assert pool.reservation(item.request) is None
    assert await node.decode(item.request, generated[0], 5) == generated[1:]


async def test_decode_ends_at_the_end_of_the_context(node: Node) -> None:
    (group,) = await node.adopt(4)
    context = node.engine.describe().prompt_tokens_max + 1
    assert context == 512
    item = node.item(prompt(context - 3))
    first = (await node.prefill(group, item)).first_token.token
    await node.engine.hand_off(item.request)
    assert len(await node.decode(item.request, first, 100)) == 3


async def test_bad_input_is_refused_by_name(node: Node) -> None:
    (group,) = await node.adopt(4)
    good = node.item(prompt(20))
    no_token = prompt(20)
    no_token[7] = 259
    bad = {
        "tokens: 0 tokens; a prompt has 1 to 511": node.item(prompt(0)),
        "tokens: 512 tokens; a prompt has 1 to 511": node.item(prompt(512)),
        "tokens: id 259 is outside": node.item(no_token),
        "chain: 2 ids for 1 whole blocks": replace(node.item(prompt(15)), chain=good.chain),
        "top_p: 0": node.item(prompt(20), Sampling(top_p=0)),
        "temperature: nan": node.item(prompt(20), Sampling(temperature=math.nan)),
        "logprobs: 1000": node.item(prompt(20), Sampling(logprobs=1000)),
    }
    for message, item in bad.items():
        with pytest.raises(EngineError, match=message):
            await node.prefill(group, item)
    await node.prefill(group, good)
    with pytest.raises(EngineError, match="already reserved"):
        await node.prefill(group, good)
    await node.engine.hand_off(good.request)
    with pytest.raises(EngineError, match="first_token: 300"):
        await node.decode(good.request, 300, 1)
