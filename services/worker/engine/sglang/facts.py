"""What an SGLang server says of itself, and whether it may serve in this pool. Pure.

A server that serves another model, cuts its cache into other pages or keeps none answers every request, and wrongly: so it is
refused when it joins, with the field, what it has and what is needed. Another version may differ in any field of an answer
or an event.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Json

from services.worker.engine.sglang.model_facts import ModelFacts
from services.worker.engine.sglang.plugin.fitness import VERSION
from services.worker.engine.sglang.settings import ServerAddress, SglangSettings

WILDCARDS = ("*", "0.0.0.0")  # noqa: S104 - compared with, not bound

Mode = Literal["null", "prefill", "decode"]


class KvEventsConfig(BaseModel):
    """What it was told of them with `--kv-events-config`."""

    model_config = ConfigDict(frozen=True)

    bind: bool | None = None
    format: str = "default"


class KvEvents(BaseModel):
    """Where its KV events are published: one port for each rank that has a cache of its own."""

    model_config = ConfigDict(frozen=True)

    endpoint_host: str
    endpoint_port_base: int
    block_size: int
    dp_size: int
    replay_endpoint_port_base: int | None = None
    load_endpoint_port_base: int | None = None

    def address(self, base: int, rank: int, reached_at: str) -> str:
        """Where a subscriber connects: a server that listens on every address is reached where its HTTP is."""
        host = reached_at if self.endpoint_host in WILDCARDS else self.endpoint_host
        return f"tcp://{host}:{base + rank}"


class Facts(BaseModel):
    """The fields of `/server_info` and `/model_info` that matter here."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    version: str
    model_path: str
    architectures: tuple[str, ...] = ()
    page_size: int
    tp_size: int
    pp_size: int
    dp_size: int = 1
    attn_dp_size: int | None = None
    max_total_num_tokens: int
    max_req_input_len: int
    disable_radix_cache: bool
    enable_hierarchical_cache: bool = False
    disaggregation_mode: Mode
    incremental_streaming_output: bool = False
    startup_time: dict[str, Any] = Field(min_length=1)
    kv_events: KvEvents | None = None
    kv_events_config: Json[KvEventsConfig] | None = None
    internal_states: tuple[dict[str, Any], ...] = ()

    @property
    def boot(self) -> str:
        """What tells lives of a server apart: it measures how long its start took, to the microsecond."""
        return json.dumps(self.startup_time, sort_keys=True)

    @property
    def life(self) -> str:
        """The same in eight hexadecimal digits."""
        return hashlib.sha256(self.boot.encode()).hexdigest()[:8]

    @property
    def caches(self) -> int:
        """How many independent caches it has."""
        return max(self.dp_size, self.attn_dp_size or 1)


def refusals(facts: Facts, server: ServerAddress, settings: SglangSettings, model: ModelFacts) -> list[str]:
    """Everything for which a prefill server cannot serve here."""
    return [f"{server.url}: {reason}" for reason in _refusals(facts, server, settings, model)]


def _refusals(facts: Facts, server: ServerAddress, settings: SglangSettings, model: ModelFacts) -> Iterator[str]:
    yield from _identity(facts, settings, model)
    if (ranks := facts.tp_size * facts.pp_size) != server.degree:
        yield f"tp_size × pp_size: {ranks} GPUs, but sglang_servers says degree {server.degree}"
    caches = server.degree if settings.adaptive else 1
    if facts.caches != caches:
        needed = "one per GPU, as the plug-in needs" if settings.adaptive else "one (no data parallelism)"
        yield f"attn_dp_size: {facts.caches} caches; needed: {needed}"
    if settings.adaptive and not any("vertumnus" in state for state in facts.internal_states):
        yield "internal_states: no rank has the plug-in; install this project beside SGLang, start it with VERTUMNUS_SGLANG=1"
    blocks = facts.max_total_num_tokens // settings.block_tokens
    if blocks < settings.blocks_per_rank:
        yield f"max_total_num_tokens: room for {blocks} blocks, but blocks_per_rank says {settings.blocks_per_rank}"
    if facts.max_req_input_len < (longest := settings.prompt_tokens_max(model)):
        yield f"max_req_input_len: {facts.max_req_input_len}, but prompts of {longest} tokens follow from context_tokens_max"
    if facts.disable_radix_cache:
        yield "disable_radix_cache: no prefix is ever reused; start it without --disable-radix-cache"
    if settings.adaptive and facts.enable_hierarchical_cache:
        yield "enable_hierarchical_cache: a server with the plug-in cannot change its geometry with it"
    wanted: Mode = "prefill" if settings.disaggregated else "null"
    if facts.disaggregation_mode != wanted:
        yield f"disaggregation_mode: {facts.disaggregation_mode!r}; needed: {wanted!r}, by what sglang_decode says"
    if facts.kv_events is None:
        yield "kv_events: it publishes none, so nobody knows what it holds; start it with --kv-events-config"
    else:
        yield from _events(facts.kv_events, facts.kv_events_config or KvEventsConfig(), server, settings)


def _events(told: KvEvents, config: KvEventsConfig, server: ServerAddress, settings: SglangSettings) -> Iterator[str]:
    """For which they would be heard wrongly, or not at all."""
    if told.block_size != settings.block_tokens:
        yield f"kv_events.block_size: {told.block_size}, but block_tokens is {settings.block_tokens}"
    if config.format != "default":
        yield f"kv_events_config.format: {config.format!r} names pages in another way; needed: 'default'"
    if told.endpoint_host not in WILDCARDS and not config.bind:
        yield f"kv_events_config.endpoint: {told.endpoint_host!r}: it connects to a host; needed: '*', or \"bind\": true"
    if ":" in server.host:
        yield "kv_events: it publishes on IPv4 alone; name it by an IPv4 address or a host's name, not by an IPv6 address"


def decode_refusals(facts: Facts, url: str, settings: SglangSettings, model: ModelFacts) -> list[str]:
    """Everything for which a decode server cannot take part."""
    found = list(_identity(facts, settings, model))
    if facts.disaggregation_mode != "decode":
        found.append(f"disaggregation_mode: {facts.disaggregation_mode!r}; needed: 'decode'")
    return [f"{url}: {reason}" for reason in found]


def _identity(facts: Facts, settings: SglangSettings, model: ModelFacts) -> Iterator[str]:
    """What prefill and decode servers must share with the pool."""
    if facts.version != VERSION:
        yield f"version: {facts.version}; this adapter was tested with {VERSION}"
    if PurePosixPath(facts.model_path).name != settings.model_dir.name:
        yield f"model_path: {facts.model_path!r}; this pool serves {settings.model_dir.name!r}"
    if facts.architectures and facts.architectures != model.architectures:
        yield f"architectures: {list(facts.architectures)}; the model directory says {list(model.architectures)}"
    if facts.page_size != settings.block_tokens:
        yield f"page_size: {facts.page_size}, but block_tokens is {settings.block_tokens}; they must be equal"
