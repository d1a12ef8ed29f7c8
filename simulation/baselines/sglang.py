"""SGLang's `cache_aware` routing.

Source: sglang-router 0.3.2, `sgl-model-gateway/src/policies/cache_aware.rs` and `tree.rs`; its command line's defaults,
`py_src/sglang_router/router_args.py`: cache threshold 0.3, balance thresholds 64 and 1.5, a tree of 2^26 characters a worker.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import takewhile

from shared.contracts.ids import BlockId, RequestId, WorkerId
from simulation.baselines.rule import Prompt, WorkerView

CACHE_THRESHOLD = 0.3
"""A larger part of the prompt than this must be known for the prompt to follow it."""

BALANCE_REQUESTS, BALANCE_FACTOR = 64, 1.5
"""The pool is unbalanced when the busiest worker has more outstanding requests than the idlest by both bounds."""

TREE_TOKENS_MAX = 2**26 // 4
"""For each worker, at four characters to a token."""


class SentPrefixes:
    """What was sent where: the router's guess of the caches, which hears neither of evictions nor of what was never computed.

    A block belongs to the worker that was first sent it, for as long as it is remembered for that worker. Memory: one entry
    for each block and worker; of each worker the least recently sent go first, children before parents.
    """

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max
        self._of_block: dict[BlockId, dict[WorkerId, None]] = {}
        self._of_worker: dict[WorkerId, OrderedDict[BlockId, None]] = {}

    def match(self, chain: Sequence[BlockId]) -> tuple[int, WorkerId | None]:
        """How many leading blocks were sent anywhere, and to whom the last of them belongs."""
        known = sum(1 for _ in takewhile(self._of_block.__contains__, chain))
        return known, next(iter(self._of_block[chain[known - 1]])) if known else None

    def send(self, prompt: Prompt, worker: WorkerId) -> None:
        """Remember a prompt that went to a worker."""
        sent = self._of_worker.setdefault(worker, OrderedDict())
        for block in reversed(prompt.chain):
            sent[block] = None
            sent.move_to_end(block)
            self._of_block.setdefault(block, {}).setdefault(worker)
        while len(sent) * prompt.block_tokens > self._tokens_max:
            self._forget(worker, sent.popitem(last=False)[0])

    def keep_only(self, workers: Collection[WorkerId]) -> None:
        """Forget workers that are gone."""
        for worker in self._of_worker.keys() - workers:
            for block in self._of_worker.pop(worker):
                self._forget(worker, block)

    def _forget(self, worker: WorkerId, block: BlockId) -> None:
        holders = self._of_block[block]
        del holders[worker]
        if not holders:
            del self._of_block[block]


class CacheAware:
    """While the pool is balanced, a prompt of which enough was sent somewhere before goes there; every other prompt goes to the
    worker with the fewest outstanding requests, of equals the first."""

    name = "sglang-cache-aware"

    def __init__(self) -> None:
        self._sent = SentPrefixes(TREE_TOKENS_MAX)

    def choose(self, prompt: Prompt, workers: Sequence[WorkerView]) -> WorkerId | None:
        """By affinity or by load."""
        idlest = min(workers, key=lambda each: each.outstanding_requests)
        least, most = idlest.outstanding_requests, max(each.outstanding_requests for each in workers)
        if most - least > BALANCE_REQUESTS and most > least * BALANCE_FACTOR:
            return idlest.worker
        present = {each.worker for each in workers}
        self._sent.keep_only(present)
        known, owner = self._sent.match(prompt.chain)
        if owner is not None and known * prompt.block_tokens > CACHE_THRESHOLD * prompt.tokens:
            return owner
        return idlest.worker

    def placed(self, request: RequestId, prompt: Prompt, worker: WorkerId) -> None:
        """Whatever the reason, the prompt is remembered there."""
        self._sent.send(prompt, worker)

    def ended(self, request: RequestId, worker: WorkerId) -> None:
        """The tree keeps what was sent."""
