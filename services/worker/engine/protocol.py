"""What the node agent asks of an engine, and what it may rely on. One contract suite runs against every engine.

An engine owns one node: its ranks, their KV memory and the index of which block lies where. It knows nothing of NATS, of
routers or of the log. Rules for every engine:

1.  The agent calls from one event loop. Calls for different workers may run at the same time; at most one `prefill` runs
    per worker. `decode` runs beside them.
2.  A command that names an epoch is refused with `StaleEpoch` unless it is the epoch the engine serves: geometry is
    pinned per step, and nothing runs under one that has been left.
3.  `adopt` happens at a step boundary: the agent lets running steps finish first, or the call raises `Busy`. All ranks
    adopt or none does (`RolledBack`). Weights and KV stay where they are. Afterwards `resident` tells what each new worker
    holds: a split leaves out blocks whose parents lie on a sibling's ranks, and a later merge may bring them back.
4.  A block is stored only when every layer of it is. Holders are prefix-closed: a worker never holds a block without its
    parent, eviction goes leaf first.
5.  The KV of a finished prefill stays pinned until `release`: a hand-off may read it through evictions, prefills, switches.
6.  A prompt may take several steps (`PrefillItem.until`), and other requests may have the steps between them. The first step
    takes the KV blocks of the whole prompt, so a prompt that was begun can end; they stay pinned until `release`. `adopt`
    drops the pins of unfinished prompts: such a request goes on, at any worker of the new geometry, from what that holds.
7.  Steps go before copies: a copy takes only what is free or may be evicted, and is called off when a step lacks room. What
    the copy has brought stays, and may be evicted.
8.  What becomes of blocks is told in order. `noted`, of `prefill` and `copy_blocks`, is called with the result in the very turn
    of the loop in which it became true, also if the caller has left meanwhile; by the time that the call returns, other calls
    may have changed more. Whoever records what workers hold does it there. It must not fail.
9.  `EngineDied` means that ranks are gone: close the engine, start a new one, register the node under a new incarnation.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from services.worker.engine.continuation import NO_PAST, Continuation, Past
from services.worker.engine.copy_plan import Copied, CopyPlan, Evicted, HandOffPlan, Pinned
from services.worker.engine.errors import Busy as Busy
from services.worker.engine.errors import Cancelled as Cancelled
from services.worker.engine.errors import EngineDied as EngineDied
from services.worker.engine.errors import EngineError as EngineError
from services.worker.engine.errors import OutOfBlocks as OutOfBlocks
from services.worker.engine.errors import RolledBack as RolledBack
from services.worker.engine.errors import StaleEpoch as StaleEpoch
from shared.contracts.ids import BlockId, RequestId
from shared.model.blocks import Tokens
from shared.model.lattice import Composition, Group

STEP_ITEMS_MAX = 64
"""Requests in one step. Short prompts are worth packing until they fill the ranks, and a few dozen do."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What a node brings. Constant from `start` to `close`."""

    engine: Literal["torch", "sglang", "modelled"]
    model: str
    model_revision: str
    tokenizer_revision: str
    dtype: str
    kv_layout: Literal["cyclic", "replicated"]
    block_tokens: int
    prefill_ranks: int
    decode_ranks: int
    degrees: tuple[int, ...]
    blocks_per_rank: int
    prompt_tokens_max: int
    kv_bytes_per_token: int
    device: str = "cpu"  # `modelled` where nothing computes
    moves_kv: bool = True  # or copies compute a prefix anew
    decode_sequences: int = 0
    """How many a decode rank takes at a time, hand-offs beyond it wait. 0 for an engine that takes none from other nodes."""
    lends: bool = False
    """Whether other nodes of the same kind can read its KV, and it theirs."""
    evicts: bool = True  # single prefixes, or `evict` is refused


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: a function of (logits, seed, position), and with penalties of the tokens before it."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int = 0
    """How many alternatives to report per token; 0 reports none."""
    top_k: int = 0
    """Of how many most likely tokens one is chosen; 0 for all."""
    min_p: float = 0.0
    """Tokens are left out that are less likely than this part of the most likely one."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    """None of `stops` comes before so many tokens."""
    stops: tuple[int, ...] = ()
    json_schema: str | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `logprobs` holds (token id, log-probability), the chosen token first, when asked for."""

    token: int
    logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillItem:
    """One request of a step. `chain` holds the ids of the prompt's whole blocks, or of the leading ones: a request that goes
    on elsewhere has generated tokens at the end of its prompt, and nobody has named their blocks. Those are not stored.

    `until` is how far the step takes the prompt: to its end if None, else to this many tokens, a multiple of the block size
    below the prompt's length. The request's next step is given the same tokens and chain, and goes on from there. `then` is
    None if nothing is to be decoded. The last `generated_tokens` are no part of what the client sent."""

    request: RequestId
    tokens: Tokens
    chain: tuple[BlockId, ...]
    sampling: Sampling = Sampling()
    until: int | None = None
    then: Continuation | None = None
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """One engine step of one worker: at least one request, at most `STEP_ITEMS_MAX`, none of them twice.

    Items do not see each other's new blocks. A prefix that two of them share and the worker does not hold is computed twice
    and stored once, so whoever packs a step leaves such requests to the steps after it."""

    epoch: int
    group: Group
    items: tuple[PrefillItem, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks `first_depth … first_depth + blocks - 1` of the item's chain became resident. The block at depth i lies on
    rank `group.first_rank + i mod degree` (cyclic layout)."""

    first_depth: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ItemResult:
    """One request's share of a step. `cached_tokens` of its prompt were there before, from other requests or earlier steps,
    and with `computed_tokens` they are how far it is now.

    *finished*: that is the whole prompt, and there is a first token. *unfinished*: another step is to go on; the whole
    blocks so far are stored. *cancelled*: it holds no pins; whole blocks that this step finished are stored all the same."""

    request: RequestId
    cached_tokens: int
    computed_tokens: int
    first_token: Token | None
    stored: Stored
    outcome: Literal["finished", "unfinished", "cancelled"] = "finished"


@dataclass(frozen=True, slots=True)
class StepResult:
    """`items` are in the order of the step's. `seconds` is engine time from the step's start to its last result. `evicted`
    left the worker to make room, before anything of this step was stored; a step that failed leaves its evictions to the
    worker's next result."""

    items: tuple[ItemResult, ...]
    seconds: float
    evicted: tuple[BlockId, ...] = ()


@dataclass(frozen=True, slots=True)
class RankAdopted:
    """One rank serves the new epoch; `seconds` from the barrier to ready."""

    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The prompt's KV is on the decode rank."""

    request: RequestId
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Health:
    """`ranks_alive` counts prefill and decode ranks. An engine that is not `ok` has died or is starting."""

    ok: bool
    ranks_alive: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Resident:
    """What one worker holds: for a full report. Each run starts at a parent (None for the root) and lists blocks in order."""

    runs: tuple[tuple[BlockId | None, tuple[BlockId, ...]], ...] = field(default=())


class Engine(Protocol):
    """See the module docstring for the rules."""

    async def start(self) -> None:
        """Load the model, start the ranks, create every group of the lattice. Serves no epoch yet.

        Errors: EngineError names what is missing or unsupported; nothing is left running.
        """

    def describe(self) -> EngineDescription:
        """May be called before `start`."""

    async def adopt(self, epoch: int, composition: Composition) -> tuple[RankAdopted, ...]:
        """Serve `composition` from now on. Repeating the epoch that is served is a no-op that answers again.

        Errors: StaleEpoch if `epoch` is older than the one served; Busy; RolledBack; ValueError for a composition that does
        not cover the prefill ranks exactly; EngineDied.
        """

    async def prefill(self, step: PrefillStep, noted: Callable[[StepResult], None] | None = None) -> StepResult:
        """Run one step: reuse what the worker holds of each chain, compute the rest or as much as asked, store the whole
        blocks, choose the first token of each prompt that is finished. A caller that leaves cancels every request of the step.

        Errors: StaleEpoch, Busy, OutOfBlocks, EngineDied, EngineError for a field out of bounds or a prompt that comes to no
        numbers. They are the step's and not an item's: items that were new hold no pins, unfinished ones are as they were.
        """

    def cached_blocks(self, group: Group, chain: Sequence[BlockId]) -> int:
        """How many leading blocks of the chain the worker holds now."""

    def resident(self, group: Group) -> Resident:
        """What the worker holds as far as it has been told, parents before children: for a report, after `take_evicted`."""

    def take_evicted(self, group: Group) -> tuple[BlockId, ...]:
        """What left the worker untold, children first: steps make room first and name it last. To be told in the very turn."""

    async def pin(self, lease: str, blocks: Sequence[BlockId]) -> Pinned:
        """Keep what the node has of `blocks`, on whatever rank, where it is until `unpin`, right through evictions and
        switches, and say how it is read. Repeating a lease answers again. Errors: EngineError if nobody can read it now, and
        then nothing is kept; EngineDied."""

    def unpin(self, lease: str) -> None:
        """End a lease. Unknown ones are ignored, so it is safe to repeat."""

    async def copy_blocks(self, plan: CopyPlan, noted: Callable[[Copied], None] | None = None) -> Copied:
        """Carry out a plan, beside whatever steps run. The worker holds the blocks when this returns, and not before; a copy
        that fails on the way, or is called off for a step, leaves those before. A caller that leaves calls the copy off:
        it then installs nothing, and its slots are free as soon as nothing is written to them.

        Errors: StaleEpoch; OutOfBlocks; Busy if too many copies run; EngineError if the worker lacks the plan's parent, the
        operation is under way or nothing can copy now; EngineDied. Nothing was done, but for evictions, which the next
        result names.
        """

    async def evict(self, group: Group, blocks: Sequence[BlockId]) -> Evicted:
        """Remove what may go, leaf first; never a pinned block, nor one with a held block below it that stays. It returns in
        the very turn (rule 8). EngineError if the group is no worker of this epoch, or single blocks cannot be taken out."""

    async def offer(self, request: RequestId) -> Pinned:
        """Where a finished prefill's KV lies, block by block to the partial last one, and how another node reads it: until
        `release`, which must not come before that node has answered. Safe to repeat. Errors: EngineError if unknown, or if no
        other node can read it; EngineDied."""

    async def hand_off(self, request: RequestId, plan: HandOffPlan | None = None) -> HandedOff:
        """Bring a finished prefill's KV to the decode side: of this node's own request, or by the plan of one that another node
        has offered, under any name that is not in use here. Waits for room. Safe to repeat. Errors: EngineError if unknown,
        or if the KV cannot be brought, and then nothing is left of it here; EngineDied."""

    def decode(
        self,
        request: RequestId,
        first_token: int,
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        sampling: Sampling,
        past: Past = NO_PAST,
    ) -> AsyncGenerator[Token, None]:
        """At most `max_new_tokens` tokens after `past` and `first_token`, ending after a stop token (which is yielded).

        Needs `hand_off` first. Closing the generator ends the sequence and frees its memory. Errors: EngineDied; EngineError.
        """

    def release(self, request: RequestId) -> None:
        """Drop the request's pins. Unknown requests are ignored, so it is safe to repeat."""

    def cancel(self, request: RequestId) -> None:
        """Release the request, at the boundary of the step that runs it if there is one. The step's other requests go on.
        Unknown requests are ignored."""

    def health(self) -> Health:
        """Answers at once, from what is known."""

    async def wait_died(self) -> str:
        """Returns the reason when a rank dies or hangs; never returns while the engine is well."""

    async def close(self) -> None:
        """End every rank and free every byte. Safe to repeat and after `EngineDied`."""
