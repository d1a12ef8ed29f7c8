"""What a worker process reads from its environment."""

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from services.worker.composer import StepLimits
from services.worker.engine.sglang.settings import DecodeAddress, ServerAddress, SglangSettings, why_not
from shared.contracts.ids import NodeId, check_token
from shared.model.blocks import BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN
from shared.model.cost import CoefficientsName
from shared.model.lattice import RANKS_MAX
from shared.runtime.settings import SecretFile, ServiceSettings

NODES_MAX = 64

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 1_024, 65_536
"""What a step computes by default. On a CPU core with a model of 135 million parameters a chunk, half of it, takes about a
second; on a GPU every chunk costs a long prompt its prefix again, and more than it wins for the others (ADR 23)."""


class WorkerSettings(ServiceSettings):
    """`VERTUMNUS_*`. A torch or sglang process is one node; a modelled process may stand for many."""

    engine: Literal["torch", "sglang", "modelled"] = "torch"
    node: str | None = Field(default=None, description="this node's name, where one process is one node")
    node_prefix: str = Field(default="n", description="nodes without a name of their own are <prefix>0, <prefix>1, …")
    nodes: int = Field(default=1, ge=1, le=NODES_MAX, description="nodes this process stands for (modelled only)")
    model_dir: Path | None = Field(default=None, description="Hugging Face directory of the model (not modelled)")

    device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="what ranks compute on (torch); by itself cuda where torch sees a GPU, else cpu"
    )
    prefill_ranks: int = Field(default=8, ge=1, le=RANKS_MAX)
    decode_ranks: int = Field(default=1, ge=0, le=RANKS_MAX)
    decode_sequences: int = Field(
        default=8, ge=1, le=1024, description="requests that a decode rank takes at a time, of any node (torch)"
    )
    block_tokens: int = Field(default=64, ge=BLOCK_TOKENS_MIN, le=BLOCK_TOKENS_MAX)
    blocks_per_rank: int | None = Field(
        default=None,
        ge=1,
        le=1 << 24,
        description="128 for torch, 4096 for modelled; for sglang max_total_num_tokens ÷ page_size of its servers",
    )
    context_tokens_max: int | None = Field(
        default=None,
        ge=2,
        le=1 << 20,
        description="prompt and new tokens of a request: 8192 for torch, 2^17 otherwise",
    )
    coefficients: CoefficientsName = Field(
        default="qwen3_30b_a3b_h20",
        description="the set that predicts this node's prefills: a name, or the path of your own (.json)",
    )

    step_tokens_max: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description="uncached tokens of one step: 1024 for torch on the CPU, 65536 on GPUs, real or modelled",
    )
    chunk_tokens: int | None = Field(
        default=None,
        ge=BLOCK_TOKENS_MIN,
        le=1 << 20,
        description="a longer prompt takes several steps, so that others get between; by itself half of step_tokens_max",
    )
    queue_max: int = Field(default=256, ge=1, le=10_000, description="assignments that may wait at one worker")
    hung_step_s_min: float = Field(
        default=120.0,
        gt=0,
        le=86_400,
        description="no step of busy ranks counts as hung before this, nor before 10 times its prediction: ranks that share CPU"
        " cores may be late by a minute; where each has a GPU, 5 is enough. Ranks that do not run are noticed in 3 s",
    )
    stop_s_max: float = Field(default=8.0, ge=0, le=25, description="what SIGTERM leaves running steps and streams")

    copy_bytes_per_s: float = Field(
        default=4e9, ge=1e4, le=1e13, description="what copies from other workers may take, all together (torch)"
    )
    copy_checksums: bool = Field(
        default=False, description="lend blocks with a checksum that the reader compares (torch)"
    )

    sglang_servers: tuple[ServerAddress, ...] = Field(
        default=(),
        description='prefill servers as JSON: [{"url": "http://host:30000", "degree": 2, "bootstrap_port": 8998}]',
    )
    sglang_decode: tuple[DecodeAddress, ...] = Field(
        default=(),
        description='decode servers as JSON: [{"url": "http://host:30001"}]; none where servers decode themselves',
    )
    sglang_adaptive: bool = Field(
        default=False, description="whether the server, one for the whole node, has the Vertumnus plug-in (sglang)"
    )
    sglang_launch: tuple[str, ...] | None = Field(
        default=None,
        description="the server's command as a JSON array, if it lives and dies with its agent (sglang)",
    )
    sglang_start_s: float = Field(
        default=900.0,
        gt=0,
        le=7_200,
        description="how long its servers may take to answer when an engine starts, as weights are loaded (sglang)",
    )
    sglang_key_file: SecretFile | None = Field(default=None, description="API key of the servers (sglang)")

    modelled_vocabulary: int = Field(default=49_152, ge=2_000, le=2**31, description="generated ids stay below this")
    speedup: float = Field(default=1.0, gt=0, le=1_000, description="modelled time is divided by it")
    noise_sd: float = Field(default=0.0, ge=0, le=1, description="of a step's time, relative")
    straggler: float = Field(default=1.0, ge=0.1, le=100, description="factor on every step of this process")
    tpot_s: float = Field(default=0.03, gt=0, le=10, description="modelled time per decoded token")
    link_bytes_per_s: float = Field(default=50e9, gt=0, le=1e15, description="modelled bandwidth of a hand-off")
    kv_bytes_per_token: int = Field(
        default=98_304, ge=1, le=2**30, description="modelled KV (48 layers, 4 heads of 128, bf16)"
    )
    seed: int = Field(default=0, description="of the modelled noise")

    @field_validator("sglang_key_file")
    @classmethod
    def _one_word(cls, path: Path | None) -> Path | None:
        """What no header can have would be in the error of each request, with the key."""
        if path is not None and not re.fullmatch(r"[!-~]+", path.read_text().strip()):
            raise ValueError(f"{path} holds more than a key: one word of ASCII characters is needed")
        return path

    @property
    def node_ids(self) -> tuple[NodeId, ...]:
        """The nodes of this process."""
        if self.node is not None:
            return (NodeId(self.node),)
        return tuple(NodeId(f"{self.node_prefix}{index}") for index in range(self.nodes))

    @property
    def blocks(self) -> int:
        """KV blocks of each prefill rank. A torch rank allocates them all when it starts."""
        return self.blocks_per_rank or (128 if self.engine == "torch" else 4_096)

    @property
    def context_tokens(self) -> int:
        """The model's own limit applies as well."""
        return self.context_tokens_max or (8_192 if self.engine == "torch" else 1 << 17)

    @property
    def step_limits(self) -> StepLimits:
        """Tokens of a step and of a chunk. ValueError if a chunk is less than a block or more than a step."""
        on_cpu = self.engine == "torch" and self.device == "cpu"
        step_tokens_max = self.step_tokens_max or (CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS)
        chunk_tokens = self.chunk_tokens or max(self.block_tokens, step_tokens_max // 2)
        if not self.block_tokens <= chunk_tokens <= step_tokens_max:
            raise ValueError(
                f"chunk_tokens: {chunk_tokens} is outside [{self.block_tokens}, {step_tokens_max}], which are block_tokens"
                " and step_tokens_max"
            )
        return StepLimits(step_tokens_max, chunk_tokens)

    @model_validator(mode="after")
    def _a_chunk_fits(self) -> Self:
        """As far as it can be told before the device is found out: see `engines.settled`."""
        if self.device is not None or self.engine != "torch" or self.step_tokens_max is not None:
            assert self.step_limits, "limits are there, or the property has said why not"
        return self

    @model_validator(mode="after")
    def _names_and_engine_agree(self) -> Self:
        for node in self.node_ids:
            check_token("node", node)
        if self.nodes > 1 and (self.node is not None or self.engine != "modelled"):
            raise ValueError(f"nodes: {self.nodes} need engine=modelled and node_prefix instead of node")
        if self.engine != "modelled" and self.model_dir is None:
            raise ValueError(f"model_dir: the {self.engine} engine needs a model directory")
        return self

    @model_validator(mode="after")
    def _servers_fit(self) -> Self:
        if self.engine != "sglang":
            return self
        if reason := why_not(self.sglang_servers, self.sglang_decode, adaptive=self.sglang_adaptive):
            raise ValueError(reason)
        if self.blocks_per_rank is None:
            raise ValueError(
                "blocks_per_rank: the sglang engine needs it, max_total_num_tokens ÷ page_size of its servers"
            )
        return self

    def sglang(self) -> SglangSettings:
        """What the sglang engine is set up with."""
        assert self.model_dir is not None, "the settings have checked it"
        return SglangSettings(
            model_dir=self.model_dir,
            servers=self.sglang_servers,
            decode=self.sglang_decode,
            adaptive=self.sglang_adaptive,
            launch=self.sglang_launch,
            block_tokens=self.block_tokens,
            blocks_per_rank=self.blocks,
            context_tokens_max=self.context_tokens,
            silence_s=self.hung_step_s_min,
            start_limit_s=self.sglang_start_s,
            key=self.sglang_key_file.read_text().strip() if self.sglang_key_file else None,
        )
