"""Prefixes that are read from other workers before prefills, in virtual time.

Who fetches, and whether it is worth it, is the agent's own decision (`services.worker.fetches`); blocks are lent, installed and
counted in the nodes' real KV indexes. A read takes its latency and its bytes over a link that nobody else uses.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import takewhile

from services.worker import cache_events
from services.worker.decider import State
from services.worker.engine.copy_plan import Copied
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.modelled_copies import LATENCY_S
from services.worker.engine.protocol import EngineError
from services.worker.fetches import Wanted, begin, decide, fetch_blocks, fetch_cause
from services.worker.job import Fetched, Job, JobKey
from shared.contracts.envelope import EventData
from shared.contracts.ids import NodeId
from shared.model.blocks import reusable_tokens
from shared.model.cost import US_PER_S
from shared.model.lattice import Group
from simulation.policies.agenda import Agenda
from simulation.policies.setup import Setup


class Fetching:
    """Of one node. `pools` are the indexes of all nodes, its own among them."""

    def __init__(
        self,
        state: State,
        setup: Setup,
        agenda: Agenda,
        pools: Mapping[NodeId, KvPool],
        say: Callable[[list[EventData]], None],
    ) -> None:
        self._state, self._setup, self._agenda, self._pools, self._say = state, setup, agenda, pools, say
        self._running: dict[JobKey, NodeId] = {}
        self._block_bytes = setup.block_tokens * setup.kv_bytes_per_token

    def begin(self, jobs: Iterable[Job], group: Group, ended: Callable[[], object]) -> None:
        """Decide for each of `jobs` of one worker that waits for a fetch and has room for it, in order."""
        begin(jobs, self._running, partial(self._decide, group), partial(self._fetch, ended, group))

    def _decide(self, group: Group, job: Job) -> Wanted | str:
        held_blocks = self._pools[self._state.node].cached_blocks(group, job.chain)
        held, wanted = self._tokens(job, held_blocks), self._tokens(job, fetch_blocks(job))
        fetch_us = round(self._seconds(fetch_blocks(job) - held_blocks) * US_PER_S)
        return decide(self._setup.coefficients, group.degree, job.assign.prompt_tokens, (held, wanted), fetch_us)

    def _fetch(self, ended: Callable[[], object], group: Group, job: Job, source: NodeId, wanted: Wanted) -> None:
        pool, operation, began_ns = self._pools[self._state.node], job.key.engine_id, self._agenda.now_ns
        lent = self._pools[source].copies.lend(operation, job.chain[: fetch_blocks(job)])
        there = sum(1 for _ in takewhile(lambda ref: ref is not None, lent))
        try:
            coming = pool.copies.install(operation, group, None, job.chain[:there])
        except EngineError:
            self._pools[source].copies.end_lease(operation)
            job.fetched = Fetched(wanted.held_tokens, 0, 0, "full")
            return
        self._running[job.key] = source
        blocks = min(len(coming.blocks), self._blocks_within(wanted.limit_s))
        seconds = min(self._seconds(len(coming.blocks)), wanted.limit_s)
        self._agenda.after(seconds, partial(self._finish, job, group, wanted, blocks, began_ns, ended))

    def _finish(
        self, job: Job, group: Group, wanted: Wanted, arrived: int, began_ns: int, ended: Callable[[], object]
    ) -> None:
        pool, operation = self._pools[self._state.node], job.key.engine_id
        self._pools[self._running.pop(job.key)].copies.end_lease(operation)
        void = pool.copies.is_void(operation)
        installed = pool.copies.finish(operation, arrived)
        seconds = (self._agenda.now_ns - began_ns) / 1e9
        if not void:
            copied = Copied(
                parent=installed.parent,
                blocks=installed.blocks,
                first_depth=installed.first_depth,
                bytes=arrived * self._block_bytes,
                seconds=seconds,
                evicted=pool.take_evicted(group),
            )
            number = self._state.numbers.get(job.worker, 0)
            self._say(cache_events.copied(job.worker, self._state.incarnation, number, fetch_cause(job), copied))
        held_blocks = wanted.held_tokens // self._setup.block_tokens
        tokens = max(0, self._tokens(job, held_blocks + len(installed.blocks)) - wanted.held_tokens)
        job.fetched = Fetched(wanted.held_tokens, tokens, round(seconds * US_PER_S), "stale-epoch" if void else None)
        ended()

    def _seconds(self, blocks: int) -> float:
        return LATENCY_S + blocks * self._block_bytes / self._setup.link_bytes_per_s

    def _blocks_within(self, seconds: float) -> int:
        return max(0, int((seconds - LATENCY_S) * self._setup.link_bytes_per_s / self._block_bytes))

    def _tokens(self, job: Job, blocks: int) -> int:
        return reusable_tokens(blocks, self._setup.block_tokens, job.assign.prompt_tokens)
