"""Entry point of `sglang.srt.plugins`: what SGLang does on every device that a CPU cannot, or cannot do that way."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vertumnus_sglang_cpu.faults import Faults

BACKEND = "vertumnus_cpu"


def register() -> None:
    """Called once in each process of a server, before anything is built."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choices.add_attention_backend_choices([BACKEND])

    @register_attention_backend(BACKEND)
    def _backend(runner: Any) -> Any:
        from vertumnus_sglang_cpu.attention import ContextParallelNative

        return ContextParallelNative(runner)

    group = "sglang.srt.distributed.parallel_state.GroupCoordinator."
    HookRegistry.register(group + "all_gather_into_tensor", _all_gather, HookType.AROUND)
    HookRegistry.register(group + "reduce_scatter_tensor", _reduce_scatter, HookType.AROUND)
    if (faults := os.environ.get("VERTUMNUS_SGLANG_FAULTS")) is not None:
        Faults(Path(faults)).install(HookRegistry.register, HookType.AROUND)
    _send_kv_from_host_memory()
    torch.empty = partial(_unpinned, torch.empty)
    # The eager runner asks for the stream of its context-parallel branch and does not use the answer.
    torch.cuda.current_stream = lambda *_: None


def _all_gather(_original: Callable[..., Any], group: Any, output: torch.Tensor, local: torch.Tensor) -> Any:
    """The custom operator behind it is registered for accelerators only."""
    if group.world_size == 1:
        return output.copy_(local)
    return dist.all_gather_into_tensor(output, local.contiguous(), group=group.device_group)


def _reduce_scatter(_original: Callable[..., Any], group: Any, output: torch.Tensor, local: torch.Tensor) -> Any:
    """gloo has no reduce-scatter."""
    if group.world_size == 1:
        return output.copy_(local)
    total = local.contiguous().clone()
    dist.all_reduce(total, group=group.device_group)
    return output.copy_(total.chunk(group.world_size, dim=0)[group.rank_in_group])


def _send_kv_from_host_memory() -> None:
    """Slot numbers are in host memory anyway: without this the sender pins them and waits for CUDA events."""
    try:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender
    except ImportError:
        return  # without the transfer engine there is no prefill/decode disaggregation, and all else works
    MooncakeKVSender.supports_host_tensor_indices = False


def _unpinned(empty: Callable[..., torch.Tensor], *arguments: Any, **keywords: Any) -> torch.Tensor:
    """Pinned memory needs a driver."""
    keywords.pop("pin_memory", None)
    return empty(*arguments, **keywords)
