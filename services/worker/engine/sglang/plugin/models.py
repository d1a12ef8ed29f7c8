"""Weights that no switch moves: every unit has feed-forward layers of its own, and models where that is not so are refused.

Attention's weights are divided among `attn_tp` ranks only, which never changes. SGLang divides a dense feed-forward
layer among all ranks of the server, and experts by settings that it checks against the degree; both are told here to be
a unit's own. It keeps the per-layer plans for context parallelism only if the server is launched with some, so that
check is answered by the flag.
"""

import inspect
from collections.abc import Callable
from typing import Any

import sglang.srt.models.qwen2 as qwen2
import sglang.srt.models.qwen3 as qwen3
import sglang.srt.models.qwen3_moe as qwen3_moe
from sglang.srt.layers.layer_boundary import declare_attn, declare_ffn
from sglang.srt.runtime_context import get_parallel

from services.worker.engine.sglang.plugin.fitness import refuse_model
from services.worker.engine.sglang.plugin.rebinding import Groups


def install(register: Callable[..., None], around: Any, groups: Groups) -> None:
    """Before any model is built."""
    qwen2.MergedColumnParallelLinear = _whole(qwen2.MergedColumnParallelLinear)
    qwen2.RowParallelLinear = _whole(qwen2.RowParallelLinear)
    for layer in (qwen3.Qwen3DecoderLayer, qwen3_moe.Qwen3MoeDecoderLayer):
        layer.stage_facts = staticmethod(_own_layers)
    experts = _Experts(groups)
    qwen3_moe.Qwen3MoeMLP = experts.build
    target = "sglang.srt.models.qwen3_moe."
    register(target + "Qwen3MoeDecoderLayer.__init__", experts.layer, around)
    register(target + "Qwen3MoeSparseMoeBlock.__init__", experts.block, around)
    register("sglang.srt.layers.layer_boundary.layout._prefill_cp_shards_tokens", _plans_for_degrees, around)
    register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _check_model, around)


def _check_model(original: Callable[..., Any], runner: Any, *more: Any, **named: Any) -> Any:
    reason = refuse_model(list(runner.model_config.hf_config.architectures or ()))
    if reason is not None:
        raise RuntimeError(reason)
    return original(runner, *more, **named)


def _whole(layer: Any) -> Callable[..., Any]:
    """Layers of this class, each rank with all of it."""

    def build(*arguments: Any, **named: Any) -> Any:
        return layer(*arguments, **{**named, "parallel_group": "replicated"})

    return build


def _own_layers(_config: Any, _layer: int) -> Any:
    """The stages of a layer: attention over the group, and a feed-forward part that talks to nobody."""
    return declare_attn(), declare_ffn(sparse=False, next_layer_sparse=False, dense_tp_size=1)


def _plans_for_degrees(_original: Callable[..., Any]) -> bool:
    return bool(get_parallel().enable_prefill_cp)


class _Experts:
    """The declaration that a layer is a unit's own also makes SGLang build a dense one: it gets the experts all the
    same."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._building: tuple[Any, int] | None = None

    def layer(self, original: Callable[..., None], layer: Any, *arguments: Any, **named: Any) -> None:
        """Around the decoder layer's constructor: remember whose feed-forward part comes next."""
        bound = inspect.signature(original).bind(layer, *arguments, **named).arguments
        self._building = bound["config"], bound["layer_id"]
        original(layer, *arguments, **named)

    def build(self, *, quant_config: Any = None, prefix: str = "", **_dense: Any) -> Any:
        """In place of the dense layer."""
        assert self._building is not None, "a decoder layer is being built"
        config, index = self._building
        return qwen3_moe.Qwen3MoeSparseMoeBlock(layer_id=index, config=config, quant_config=quant_config, prefix=prefix)

    def block(self, original: Callable[..., None], block: Any, *arguments: Any, **named: Any) -> None:
        """Around the experts' constructor: all of them on every rank. (As settings of the server, SGLang would refuse
        these.)"""
        parallel, alone = get_parallel(), self._groups.of_degree[1]
        with parallel.override(
            moe_dp_size=parallel.tp_size,
            moe_ep_size=1,
            moe_ep_rank=0,
            moe_tp_size=1,
            moe_tp_rank=0,
            moe_ep_group=alone,
            moe_tp_group=alone,
        ):
            original(block, *arguments, **named)
