"""Whether the plug-in fits its SGLang, and the server fits the plug-in. SGLang itself only logs a hook that finds nothing."""

import importlib
from collections.abc import Mapping, Sequence

VERSION = "0.5.23"
"""The version that was read and run."""

TARGETS = (
    "sglang.srt.disaggregation.common.conn:CommonKVSender.__init__",
    "sglang.srt.distributed.parallel_state:get_attn_cp_group",
    "sglang.srt.distributed.parallel_state:get_world_group",
    "sglang.srt.distributed.parallel_state:init_model_parallel_group",
    "sglang.srt.distributed.parallel_state:initialize_model_parallel",
    "sglang.srt.entrypoints.engine:Engine._launch_scheduler_processes",
    "sglang.srt.layers.cp.base:_STRATEGY",
    "sglang.srt.layers.layer_boundary:declare_attn",
    "sglang.srt.layers.layer_boundary:declare_ffn",
    "sglang.srt.layers.layer_boundary.layout:_prefill_cp_shards_tokens",
    "sglang.srt.managers.data_parallel_controller:DataParallelController.event_loop",
    "sglang.srt.managers.data_parallel_controller:DataParallelController.send_control_message",
    "sglang.srt.managers.data_parallel_controller:DataParallelController.send_to_all_workers",
    "sglang.srt.managers.io_struct:AbortReq",
    "sglang.srt.managers.io_struct:SetInternalStateReqOutput",
    "sglang.srt.managers.io_struct:sock_recv",
    "sglang.srt.managers.io_struct:sock_send",
    "sglang.srt.managers.scheduler:Scheduler.get_internal_state",
    "sglang.srt.managers.scheduler:Scheduler.is_fully_idle",
    "sglang.srt.managers.scheduler:Scheduler.run_batch",
    "sglang.srt.managers.scheduler:Scheduler.set_internal_state",
    "sglang.srt.managers.scheduler_components.dp_attn:SchedulerDPAttnAdapter.prepare_mlp_sync_batch",
    "sglang.srt.managers.scheduler_components.idle_sleeper:IdleSleeper.maybe_sleep",
    "sglang.srt.managers.scheduler_components.kv_events_publisher:SchedulerKvEventsPublisher.publish_kv_events",
    "sglang.srt.managers.scheduler_components.new_token_ratio_tracker:NewTokenRatioTracker.reset",
    "sglang.srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver._pull_raw_reqs",
    "sglang.srt.mem_cache.base_prefix_cache:InsertParams",
    "sglang.srt.mem_cache.base_prefix_cache:MatchPrefixParams",
    "sglang.srt.mem_cache.radix_cache:RadixKey",
    "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface:UnifiedTreeCoreInterface.collect_full_device_indices",
    "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface:UnifiedTreeCoreInterface.match_full_device_prefix",
    "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface:UnifiedTreeCoreInterface.root_node_handle",
    "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface:UnifiedTreeCoreInterface.walk_for_kv_canary",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache._evict_device_leaf",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.all_values_flatten",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.evictable_size",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.insert",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.match_prefix",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.reset",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.total_size",
    "sglang.srt.model_executor.model_runner:ModelRunner.load_model",
    "sglang.srt.models.qwen2:MergedColumnParallelLinear",
    "sglang.srt.models.qwen2:RowParallelLinear",
    "sglang.srt.models.qwen3:Qwen3DecoderLayer.stage_facts",
    "sglang.srt.models.qwen3_moe:Qwen3MoeDecoderLayer.__init__",
    "sglang.srt.models.qwen3_moe:Qwen3MoeDecoderLayer.stage_facts",
    "sglang.srt.models.qwen3_moe:Qwen3MoeMLP",
    "sglang.srt.models.qwen3_moe:Qwen3MoeSparseMoeBlock.__init__",
    "sglang.srt.runtime_context:ParallelContext.override",
    "sglang.srt.runtime_context:ParallelContext.override_permanently",
    "sglang.srt.utils:set_random_seed",
)
"""Everything private that is replaced or called, as module and attribute."""

MODELS = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")

WHY_NOT = {
    "Deepseek": "its experts are spread over all ranks, which then take every step together",
    "Glm": "its experts are spread over all ranks, which then take every step together",
    "Kimi": "its experts are spread over all ranks, which then take every step together",
    "Qwen3Next": "its linear-attention state is not in the prefix tree that a merge rebuilds",
}
"""By the beginning of an architecture's name."""

ENVIRONMENT: Mapping[str, tuple[object, str]] = {
    "SGLANG_SCHEDULER_SKIP_ALL_GATHER": (True, "else all ranks gather in each step"),
    "SGLANG_RUST_SERVER": (False, "its messages do not come through sockets"),
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": (False, "its process groups cannot follow a switch of some ranks"),
}

SETTINGS: Mapping[str, tuple[object, str]] = {
    "attn_cp_size": (1, "units are launched on their own"),
    "pp_size": (1, "stages of a pipeline would have to switch together"),
    "nnodes": (1, "a server is one node's"),
    "tokenizer_worker_num": (1, "answers of units are gathered by one tokenizer process"),
    "enable_prefill_cp": (True, "the plans of layers are made for context parallelism"),
    "cp_strategy": ("zigzag", "the only one that dense attention backends follow"),
    "enable_dp_lm_head": (True, "else embeddings are divided among all ranks"),
    "enable_dp_attention_local_control_broadcast": (True, "else control messages are collective over all ranks"),
    "enable_hierarchical_cache": (False, "a merge does not know of blocks in host memory"),
    "enable_unified_cache_external_linker": (
        False,
        "a merge does not know of what it loads and writes meanwhile",
    ),
    "enable_lmcache": (False, "its cache is not the prefix tree that a merge rebuilds"),
    "enable_flexkv": (False, "its cache is not the prefix tree that a merge rebuilds"),
    "enable_kv_cache_sharding": (False, "KV would not be whole on each rank, and a split would have to move it"),
    "enable_prefill_delayer": (False, "it gathers over all ranks in each step"),
    "enable_symm_mem": (False, "its buffers belong to the launch's groups"),
    "enable_two_batch_overlap": (False, "it assumes that all ranks take every step together"),
    "speculative_algorithm": (None, "keys of its trees are pairs of tokens, which are not logged"),
    "enable_lora": (None, "untested: adapters are weights that a switch would have to keep equal"),
    "elastic_ep_backend": (None, "it changes the number of ranks by itself"),
    "disable_radix_cache": (False, "there would be no tree to keep"),
}


def missing(version: str, targets: Sequence[str] = TARGETS) -> list[str]:
    """All that is not as it was when the plug-in was made. Empty: it fits."""
    found = [] if version == VERSION else [f"SGLang is {version}; the plug-in is made for {VERSION}"]
    for target in targets:
        module, _, path = target.partition(":")
        try:
            there: object = importlib.import_module(module)
            for name in filter(None, path.split(".")):
                there = getattr(there, name)
        except (ImportError, AttributeError) as error:
            found.append(f"{target} ({error})")
    return found


def refuse_settings(given: Mapping[str, object]) -> list[str]:
    """What a server was launched with that its geometry cannot change under, each with its reason. `given` has SGLang's
    resolved arguments and the variables of `ENVIRONMENT`."""
    found = []
    for name, (wanted, reason) in {**SETTINGS, **ENVIRONMENT}.items():
        value = given[name]
        if value != wanted and (value or wanted):
            found.append(f"{name} is {value!r} and must be {wanted!r}: {reason}")
    return found


def refuse_model(architectures: Sequence[str]) -> str | None:
    """Why a model cannot change its degree while it runs; None if it can."""
    if any(name in MODELS for name in architectures):
        return None
    name = ", ".join(architectures) or "a model of no known architecture"
    known = next((why for start, why in WHY_NOT.items() if name.startswith(start)), None)
    reason = known or "its weights are laid out by the degree, or nobody has proven that they are not"
    return f"{name} cannot change its degree while it runs: {reason}. Serve it with a fixed degree, without VERTUMNUS_SGLANG=1"
