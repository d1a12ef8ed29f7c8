"""What of the way to a GPU can be tested without one: who computes where, what is refused, and that no tensor of a step is
made elsewhere than on the device that the rank was given. Tensors on "meta" have shapes and no content, and an operation on
one of them and one of the CPU fails, as it would with a GPU."""

import ast
import asyncio
import os
import socket
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.worker import __main__ as worker
from services.worker.engine.protocol import EngineError
from services.worker.engine.slot_ref import SlotRef
from services.worker.engine.torch import devices
from services.worker.engine.torch.attention import attend_causally, on_cuda
from services.worker.engine.torch.devices import backend_of, device_of, gpus_for, visible_gpus
from services.worker.engine.torch.kv_layout import KvLayout
from services.worker.engine.torch.kv_memory import KvMemory
from services.worker.engine.torch.messages import Attach, Part, Prefill, frame, receive
from services.worker.engine.torch.model import Model
from services.worker.engine.torch.model_config import read_config
from services.worker.engine.torch.move_messages import PoolHandle
from services.worker.engine.torch.prefill import prefill
from services.worker.engine.torch.weights import Weights
from services.worker.engines import engines, settled
from services.worker.settings import WorkerSettings
from shared.model.lattice import Group
from shared.runtime.clock import SystemClock

ENGINE = Path(devices.__file__).parent
META = torch.device("meta")
FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}
APART = {"convert.py", "recheck.py"}
"""They make and compare models, and are no part of a rank."""


def test_ranks_are_dealt_out_to_gpus() -> None:
    assert [device_of(rank, 0) for rank in range(2)] == ["cpu", "cpu"]
    assert [device_of(rank, 3) for rank in range(5)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("prefill_ranks", "gpus", "backend"),
    [(1, 0, "gloo"), (8, 0, "gloo"), (1, 1, "nccl"), (8, 8, "nccl"), (4, 8, "nccl"), (2, 1, "gloo"), (8, 7, "gloo")],
)
def test_nccl_needs_a_gpu_for_each_rank(prefill_ranks: int, gpus: int, backend: str) -> None:
    assert backend_of(prefill_ranks, gpus) == backend
    if backend == "nccl":
        assert len({device_of(rank, gpus) for rank in range(prefill_ranks)}) == prefill_ranks


def test_a_gpu_is_used_where_there_is_one_unless_the_cpu_is_asked_for() -> None:
    assert (gpus_for(None, 0), gpus_for(None, 2), gpus_for("cuda", 2), gpus_for("cpu", 2)) == (0, 2, 2, 0)


def test_torch_without_cuda_counts_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Beside a driver, too, and in a process of its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(devices, "DRIVER", tmp_path)
    assert visible_gpus() == 0


def test_a_worker_is_refused_a_gpu_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_qwen3: Path
) -> None:
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "none")
    settings = WorkerSettings(model_dir=tiny_qwen3, device="cuda")
    with (
        pytest.raises(EngineError, match=r"^device: cuda was asked for, but torch sees no GPU"),
        engines(settings, SystemClock()),
    ):
        pass


def test_a_worker_process_that_can_have_no_engine_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_qwen3: Path
) -> None:
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "none")
    monkeypatch.setenv("VERTUMNUS_MODEL_DIR", str(tiny_qwen3))
    monkeypatch.setenv("VERTUMNUS_DEVICE", "cuda")
    with pytest.raises(SystemExit, match=r"^the engine cannot be made: device: cuda was asked for"):
        asyncio.run(worker.main())


@pytest.mark.parametrize(("device", "limits"), [("cpu", (1_024, 512)), ("cuda", (65_536, 32_768))])
def test_the_steps_of_a_device_are_its_own(tiny_qwen3: Path, device: str, limits: tuple[int, int]) -> None:
    settings = WorkerSettings(model_dir=tiny_qwen3, device=device)  # type: ignore[arg-type]
    assert settled(settings).step_limits == limits


def test_a_device_that_was_left_open_is_found_out_and_its_limits_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_qwen3: Path
) -> None:
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "none")
    found = settled(WorkerSettings(model_dir=tiny_qwen3))
    assert (found.device, found.step_limits) == ("cpu", (1_024, 512))
    with pytest.raises(ValueError, match=r"^chunk_tokens: 2048 is outside \[64, 1024\]"):
        settled(WorkerSettings(model_dir=tiny_qwen3, chunk_tokens=2_048))


def test_a_handle_goes_over_the_socket_whole() -> None:
    ours, theirs = socket.socketpair()
    attach = Attach(1, (PoolHandle(1, bytes(range(256)).hex(), 1 << 40, 512, "2f61", 3, "", waits=True),))
    with ours, theirs:
        ours.sendall(frame(attach))
        assert receive(theirs) == attach


def test_every_tensor_that_is_made_names_its_device() -> None:
    silent = [
        f"{file.name}:{node.lineno}"
        for file in sorted(ENGINE.glob("*.py"))
        if file.name not in APART
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in FACTORIES
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not silent, "name the device, be it the CPU"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(10, 10, True), (10, 77, False)])
def test_the_cuda_kernels_take_and_give_our_shapes(dtype: torch.dtype, queries: int, keys: int, causal: bool) -> None:
    q_1HTD = torch.empty((1, 9, queries, 64), dtype=dtype, device=META)
    k_1GSD = torch.empty((1, 3, keys, 64), dtype=dtype, device=META)
    out_1HTD, lse_1HT = on_cuda(q_1HTD, k_1GSD, k_1GSD, causal)
    assert out_1HTD.shape == q_1HTD.shape
    assert lse_1HT.shape == (1, 9, queries)
    assert lse_1HT.dtype == torch.float32


class _NoGroups:
    """The shapes of what comes from a group of two, and nothing else."""

    def all_gather(self, group: Group, local: Tensor) -> Tensor:
        return local.new_empty((group.degree, *local.shape))

    def exchange(self, group: Group, for_ranks: Tensor) -> Tensor:
        return torch.empty_like(for_ranks)


@pytest.mark.parametrize("moves_queries", [False, True])
@pytest.mark.parametrize("degree", [1, 2])
def test_a_step_leaves_the_device_only_to_choose(tiny_qwen3: Path, degree: int, moves_queries: bool) -> None:
    """Chooses nothing, because a token of no content cannot come off."""
    if degree == 1 and moves_queries:
        return
    config = read_config(tiny_qwen3)
    layout = KvLayout.of(config, block_tokens=8, blocks=8)
    files = [os.memfd_create("test") for _ in range(degree)]
    for file in files:
        os.ftruncate(file, layout.slots_offset)
    pools = [torch.empty(layout.slots_bytes, dtype=torch.uint8, device=META) for _ in files]
    memory = KvMemory(layout, files, pools, META)
    slots = tuple(SlotRef(depth % degree, depth // degree, 1) for depth in range(6))
    reused = memory.plan(enumerate(slots[:4]))
    memory.finish_write(reused)
    part = Part(tuple(range(16)), slots, 4, 4, None, moves_queries)
    with torch.inference_mode():
        model = Model(config, Weights(tiny_qwen3, config.dtype, lambda *_: None, META), 64)
        group = Group(0, degree)
        assert prefill(Prefill(1, 1, (part,)), group, 0, model, memory, _NoGroups()) == ()  # type: ignore[arg-type]
    memory.check(memory.plan((depth, slots[depth]) for depth in (4, 5) if depth % degree == 0))
    for file in files:
        os.close(file)


def test_attention_of_a_device_stays_on_it() -> None:
    q_THD, k_SGD = (torch.empty((tokens, heads, 64), device=META) for tokens, heads in ((10, 9), (25, 3)))
    assert attend_causally(q_THD, k_SGD, k_SGD).out_THD.device == META
