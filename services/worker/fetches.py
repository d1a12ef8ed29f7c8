"""Prefixes that are read from other workers just before the prefills that need them.

Rules:

1.  An assignment names a source and how many leading blocks it holds. When the request comes near the head of its queue, the
    agent decides again: nothing is fetched if the blocks are here by now, or if by the bandwidth that this source was seen to
    have computing them is cheaper; and nothing by an engine that reads no KV, whose copies compute what the prefill does.
2.  Others with tokens at hand go first meanwhile. A fetch that fails, is refused or runs into its limit leaves what has come,
    and the prefill computes the rest. It is not tried again, and a source that gave nothing in `LIMIT_S_MIN` is not asked
    for a while.
3.  A fetch may take as long as it saves, so at worst it doubles a prefill's time; but at least `LIMIT_S_MIN`.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import structlog

from services.worker.cache_events import CopyCause
from services.worker.engine.protocol import Engine
from services.worker.job import Fetched, Job, JobKey
from services.worker.origins import of_job
from services.worker.ports import NodePorts
from services.worker.transfers import COPY_LEASE_S, Transfer, Transfers
from shared.contracts.commands import Refused
from shared.contracts.copy_commands import COPY_BLOCKS_MAX, FETCHES_PER_SOURCE_MAX, Copied
from shared.contracts.ids import NodeId, node_of
from shared.model.blocks import reusable_tokens
from shared.model.cost import US_PER_S, Coefficients

FETCHES_MAX = 8
"""At a time, of all workers of the node. With the copies that are ordered they are what an engine takes at a time."""

LIMIT_S_MIN = 1.0
"""A source that is well answers within it, and a shorter limit would give up on links that are only busy."""

SOURCES_MAX = 256
"""Nodes whose bandwidth is remembered; the one that was read least recently is forgotten."""

SEEN_WEIGHT = 0.3
"""Of the newest fetch in what a source is believed to give."""

SEEN_NS = 60 * 10**9
"""How long that is believed: a link that was busy once is tried again."""


class Wanted(NamedTuple):
    """A fetch that is worth it: what the worker holds of the prompt before, and how long it may take."""

    held_tokens: int
    limit_s: float


class _Seen(NamedTuple):
    """What a source was last seen to give; nothing, if it was silent."""

    bytes_per_s: float
    at_ns: int


def decide(
    coefficients: Coefficients, degree: int, prompt_tokens: int, tokens: tuple[int, int], fetch_us: int | None
) -> Wanted | str:
    """What is to be fetched, or why nothing is. `tokens` of the prompt are held by the worker, and by the source; `fetch_us` is
    what the rest would take, None if nobody here knows better than the router."""
    held, wanted = tokens
    if wanted <= held:
        return "here"
    computed_us, rest_us = (
        coefficients.prefill_us(degree, prompt_tokens - cached, cached) for cached in (held, wanted)
    )
    saved_us = computed_us - rest_us
    if (fetch_us or 0) >= saved_us:
        return "dearer"
    return Wanted(held, min(COPY_LEASE_S, max(LIMIT_S_MIN, saved_us / US_PER_S)))


def begin(
    jobs: Iterable[Job],
    running: Mapping[JobKey, NodeId],
    decided: Callable[[Job], Wanted | str],
    start: Callable[[Job, NodeId, Wanted], None],
) -> bool:
    """Decide for each of `jobs`, in order, that waits for a fetch, and `start` those that are worth it while there is room
    beside what is `running`, by its source. Whether somebody has found no room."""
    left_out = False
    for job in jobs:
        if is_over(job) or job.key in running:
            continue
        source, wanted = fetch_source(job), decided(job)
        if isinstance(wanted, str):
            job.fetched = Fetched(fallback=wanted)
        elif len(running) < FETCHES_MAX and list(running.values()).count(source) < FETCHES_PER_SOURCE_MAX:
            start(job, source, wanted)
        else:
            left_out = True
    return left_out


def is_over(job: Job) -> bool:
    """Whether the job waits for no fetch: it has had it, or needs none."""
    return job.fetched is not None or job.assign.fetch_from is None


class Fetches:
    """One per incarnation. `serving` says whether it lives, `spawn` begins what ends with it at the latest."""

    def __init__(
        self,
        ports: NodePorts,
        engine: Engine,
        transfers: Transfers,
        serving: Callable[[], bool],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self._ports, self._engine, self._transfers = ports, engine, transfers
        self._serving, self._spawn = serving, spawn
        description = engine.describe()
        self._block_tokens, self._token_bytes = description.block_tokens, description.kv_bytes_per_token
        self._reads = description.moves_kv
        self._running: dict[JobKey, NodeId] = {}
        self._waiting: dict[Callable[[], None], None] = {}
        self._seen: OrderedDict[NodeId, _Seen] = OrderedDict()
        self._logger = structlog.get_logger(component="fetches", node=ports.node)

    def begin(self, jobs: Iterable[Job], ended: Callable[[], None]) -> None:
        """Decide for each of `jobs`, in order, that waits for a fetch and has room for it. `ended` when one of them is over,
        and when there may be room for the others, whichever worker's fetch has made it."""

        def start(job: Job, source: NodeId, wanted: Wanted) -> None:
            task = self._spawn(self._fetch(job, source, wanted), f"fetch {job.key.engine_id}")
            self._running[job.key] = source
            task.add_done_callback(partial(self._end, job.key, ended))

        if begin(jobs, self._running, self._decide, start):
            self._waiting[ended] = None

    def _end(self, key: JobKey, ended: Callable[[], None], _task: asyncio.Task[None]) -> None:
        """As a callback, because a task that is cancelled before it began runs no `finally`."""
        del self._running[key]
        if not self._serving():
            return  # it ends with its incarnation, in which nobody begins another
        # Those who still find no room wait anew.
        waiting, self._waiting = self._waiting | {ended: None}, {}
        for each in waiting:
            each()

    # --- one fetch

    def _decide(self, job: Job) -> Wanted | str:
        if not self._reads:
            return "computes"
        group = self._ports.state.served.workers(self._ports.node)[job.worker]
        held, wanted = (
            self._tokens(job, blocks) for blocks in (self._engine.cached_blocks(group, job.chain), fetch_blocks(job))
        )
        seen = self._seen.get(fetch_source(job))
        fetch_us = None
        if seen is not None and self._ports.clock.monotonic_ns() - seen.at_ns < SEEN_NS:
            if not seen.bytes_per_s:
                return "silent" if wanted > held else "here"
            fetch_us = round((wanted - held) * self._token_bytes / seen.bytes_per_s * US_PER_S)
        return decide(self._ports.coefficients, group.degree, job.assign.prompt_tokens, (held, wanted), fetch_us)

    def _tokens(self, job: Job, blocks: int) -> int:
        return reusable_tokens(blocks, self._block_tokens, job.assign.prompt_tokens)

    async def _fetch(self, job: Job, source: NodeId, wanted: Wanted) -> None:
        """Goes on if the job leaves: what has begun to come is kept, and told."""
        clock, began_ns = self._ports.clock, self._ports.clock.monotonic_ns()
        transfer = Transfer(
            operation=f"fetch {job.key.engine_id}",
            worker=job.worker,
            parent=None,
            blocks=job.chain[: fetch_blocks(job)],
            sources=(source,),
            limit_s=wanted.limit_s,
            cause=fetch_cause(job),
            origin=of_job(job),
        )
        reply = await self._transfers.bring(transfer)
        seconds = (clock.monotonic_ns() - began_ns) / 1e9
        fallback: str | None = reply.reason if isinstance(reply, Refused) else reply.failure
        tokens = 0
        if isinstance(reply, Copied) and reply.bytes:
            tokens = self._tokens(job, wanted.held_tokens // self._block_tokens + reply.blocks) - wanted.held_tokens
            self._see(source, reply.bytes / seconds)
        elif isinstance(reply, Copied) and seconds >= LIMIT_S_MIN:
            self._see(source, 0)
        job.fetched = Fetched(wanted.held_tokens, tokens, round(seconds * US_PER_S), fallback)
        self._logger.info("fetched", request=job.assign.request, source=source, tokens=tokens, fallback=fallback)

    def _see(self, source: NodeId, bytes_per_s: float) -> None:
        known = self._seen.pop(source, None)
        if known is not None and known.bytes_per_s and bytes_per_s:
            bytes_per_s = known.bytes_per_s + SEEN_WEIGHT * (bytes_per_s - known.bytes_per_s)
        self._seen[source] = _Seen(bytes_per_s, self._ports.clock.monotonic_ns())
        if len(self._seen) > SOURCES_MAX:
            self._seen.popitem(last=False)


def fetch_source(job: Job) -> NodeId:
    """The node that it reads from."""
    assert job.assign.fetch_from is not None, f"{job.key} has nothing to fetch"
    return node_of(job.assign.fetch_from)


def fetch_cause(job: Job) -> CopyCause:
    """What a worker reads for itself is what a split has left pending there."""
    return "reconciliation" if job.assign.fetch_from == job.worker else "fetch"


def fetch_blocks(job: Job) -> int:
    """As many as one plan takes."""
    return min(job.assign.fetch_blocks, COPY_BLOCKS_MAX)
