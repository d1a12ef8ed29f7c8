"""What is simulated, apart from the requests."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.worker.composer import StepLimits
from services.worker.engine.protocol import STEP_ITEMS_MAX, EngineDescription
from shared.contracts.ids import NodeId
from shared.model.capacity import Capacities
from shared.model.cost import Coefficients
from shared.model.lattice import DEGREES, Composition
from simulation.baselines.rules import RULES

GPUS_MAX = 20_000
"""Beyond this the KV indexes alone take tens of gigabytes."""

STEP_LIMITS = StepLimits(step_tokens_max=65_536, chunk_tokens=32_768)
"""As a modelled engine's by default."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Nodes, what they cost, and what they decide by. The KV memory is that of the research runs: 1,395 blocks of 512 tokens.

    `coefficients` are what routers and agents predict by, `truth` what steps take, if that is another set. `dispatch_s` is
    from a decision to the worker's queue, `handoff_s` from the end of a prefill to the client's first token.
    `parameters` are changes to the base, as an operator makes them; `cache_manager` has one at work where they ask for none;
    `rule` is one of `simulation.baselines`, which places instead of the router's own policy.
    """

    compositions: tuple[Composition, ...]
    coefficients: Coefficients
    truth: Coefficients | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    rule: str | None = None
    block_tokens: int = 512
    blocks_per_rank: int = 1_395
    step_limits: StepLimits = STEP_LIMITS
    step_items_max: int = STEP_ITEMS_MAX
    queue_max: int = 256
    context_tokens_max: int = 1 << 20
    kv_bytes_per_token: int = 98_304
    link_bytes_per_s: float = 50e9
    noise_sd: float = 0.05
    stragglers: Mapping[NodeId, float] = field(default_factory=dict)
    dispatch_s: float = 0.0
    handoff_s: float = 0.0
    switch_s: float = 0.7
    routers: int = 1
    view_age_s: float = 0.0
    cache_manager: bool = False
    capacities: Capacities = field(default_factory=lambda: Capacities(version="none"))
    capacity_share: float = 0.7
    seed: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= GPUS_MAX:
            raise ValueError(f"gpus: {self.gpus} is outside [1, {GPUS_MAX}]")
        if self.rule is not None and self.rule not in RULES:
            raise ValueError(f"rule: {self.rule!r} is not one of {sorted(RULES)}")
        if self.rule is not None and "tenants" in self.parameters:
            raise ValueError("tenants: they share by the router's own policies, not under a rule of another system")
        if self.routers < 1:
            raise ValueError(f"routers: {self.routers} is below 1")

    @property
    def gpus(self) -> int:
        return sum(map(sum, self.compositions))

    @property
    def nodes(self) -> dict[NodeId, Composition]:
        """In id order, so that equal prices fall the same way in pools of any size."""
        width = len(str(len(self.compositions) - 1))
        return {NodeId(f"n{index:0{width}}"): each for index, each in enumerate(self.compositions)}

    def engine(self, composition: Composition) -> EngineDescription:
        """What a node of this composition brings."""
        ranks = sum(composition)
        degrees = tuple(degree for degree in DEGREES if degree <= ranks)
        prompt_tokens_max = degrees[-1] * self.blocks_per_rank * self.block_tokens
        return EngineDescription(
            engine="modelled",
            model="modelled",
            model_revision="1",
            tokenizer_revision="1",
            dtype="bfloat16",
            kv_layout="cyclic",
            block_tokens=self.block_tokens,
            prefill_ranks=ranks,
            decode_ranks=0,
            degrees=degrees,
            blocks_per_rank=self.blocks_per_rank,
            prompt_tokens_max=min(self.context_tokens_max - 1, prompt_tokens_max),
            kv_bytes_per_token=self.kv_bytes_per_token,
            device="modelled",
        )
