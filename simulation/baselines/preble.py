"""Preble's E2: exploit a prefix where it is, or explore where the load is least.

Source: Srivatsa et al., Preble: Efficient distributed prompt scheduling for LLM serving (ICLR 2025), and its released code,
WukLab/preble at 8e7906a, `preble/global_scheduler_with_time.py`: a window of 3 minutes, rebalancing at a factor of 1.5 after 50
requests per worker, no cost of evictions. A prefill costs its uncached tokens: Preble fits a line to the one kind of GPU that
it runs on, and only compares. Two things are left out: decoding, as a pool of prefill workers does none, and the second copy of
a single overloaded prefix, which waits for measured TTFTs to double.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.contracts.ids import BlockId, RequestId, WorkerId
from simulation.baselines.rule import Prompt, WorkerView

WINDOW_NS = 180 * 10**9

REBALANCE_FACTOR, REBALANCE_REQUESTS = 1.5, 50
"""The heaviest worker gives prefixes to the lightest from this factor on, once so many requests per worker were placed."""


@dataclass(slots=True, eq=False)
class _Prefix:
    """What prompts have in common: the blocks that one brought, if they were more than half of it, and those below that were
    not. `cost` is that of the window's `requests`, which its homes share."""

    homes: dict[WorkerId, None] = field(default_factory=dict)
    cost: int = 0
    requests: int = 0
    blocks: list[BlockId] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.cost / len(self.homes)


class _Past(NamedTuple):
    """A request of the window."""

    at_ns: int
    prefix: _Prefix
    cost: int


class PrebleE2:
    """Memory: the blocks of the prefixes that the window's requests used."""

    name = "preble-e2"

    def __init__(self) -> None:
        self._of_block: dict[BlockId, _Prefix] = {}
        self._window: deque[_Past] = deque()
        self._workers: dict[WorkerId, None] = {}
        self._loads: defaultdict[WorkerId, float] = defaultdict(float)
        self._placed = 0

    def choose(self, prompt: Prompt, workers: Sequence[WorkerView]) -> WorkerId | None:
        """The lightest home of a prefix that is more than half of the prompt, or else the lightest of all workers with what
        the prompt would cost there."""
        self._workers = dict.fromkeys(each.worker for each in workers)
        self._expire(prompt.now_ns)
        known = self._known_blocks(prompt)
        if 2 * known * prompt.block_tokens > prompt.tokens:
            homes = [each for each in self._of_block[prompt.chain[known - 1]].homes if each in self._workers]
            if homes:
                return min(homes, key=self._loads.__getitem__)
        return min(self._workers, key=lambda each: self._loads[each] + self._missed_tokens(prompt, each))

    def placed(self, request: RequestId, prompt: Prompt, worker: WorkerId) -> None:
        """The prompt's prefixes have a home there, and the last of them its cost."""
        cost = self._missed_tokens(prompt, worker)
        known = self._known_blocks(prompt)
        fresh = prompt.chain[known:]
        prefix = self._of_block[prompt.chain[known - 1]] if known and len(fresh) <= known else _Prefix()
        prefix.blocks.extend(fresh)
        self._of_block.update(dict.fromkeys(fresh, prefix))
        for each in dict.fromkeys((*map(self._of_block.__getitem__, prompt.chain), prefix)):
            self._spread(each, -1)
            each.homes[worker] = None
            if each is prefix:
                prefix.cost += cost
                prefix.requests += 1
            self._spread(each, 1)
        self._window.append(_Past(prompt.now_ns, prefix, cost))
        self._placed += 1
        if self._placed >= REBALANCE_REQUESTS * len(self._workers):
            self._rebalance()

    def ended(self, request: RequestId, worker: WorkerId) -> None:
        """A request counts for as long as the window lasts."""

    def _known_blocks(self, prompt: Prompt) -> int:
        return next((i for i, block in enumerate(prompt.chain) if block not in self._of_block), len(prompt.chain))

    def _missed_tokens(self, prompt: Prompt, worker: WorkerId) -> int:
        """What would be computed there, if the worker has what it is a home of."""
        held = 0
        for block in prompt.chain:
            prefix = self._of_block.get(block)
            if prefix is None or worker not in prefix.homes:
                break
            held += 1
        cached_tokens = min(held, (prompt.tokens - 1) // prompt.block_tokens) * prompt.block_tokens
        return prompt.tokens - cached_tokens

    def _spread(self, prefix: _Prefix, sign: int) -> None:
        """Count the prefix's cost at its homes, or take it off."""
        for home in prefix.homes:
            self._loads[home] += sign * prefix.share

    def _expire(self, now_ns: int) -> None:
        """What no request of the window used is forgotten, with its homes."""
        while self._window and self._window[0].at_ns < now_ns - WINDOW_NS:
            past = self._window.popleft()
            prefix = past.prefix
            self._spread(prefix, -1)
            prefix.cost -= past.cost
            prefix.requests -= 1
            self._spread(prefix, 1)
            if not prefix.requests:
                for block in prefix.blocks:
                    # It may have been brought again below a beginning that had been forgotten.
                    if self._of_block.get(block) is prefix:
                        del self._of_block[block]

    def _rebalance(self) -> None:
        """Give the heaviest worker's cheapest prefixes of several requests to the lightest, while both become more alike."""
        heaviest = max(self._workers, key=self._loads.__getitem__)
        lightest = min(self._workers, key=self._loads.__getitem__)
        if not self._too_heavy(heaviest, lightest):
            return
        shared = dict.fromkeys(past.prefix for past in self._window if past.prefix.requests > 1)
        here = [each for each in shared if heaviest in each.homes]
        for prefix in sorted(here, key=lambda each: each.share):
            if self._loads[heaviest] - prefix.share < self._loads[lightest] + prefix.share:
                return
            self._spread(prefix, -1)
            prefix.homes = {lightest: None}
            self._spread(prefix, 1)
            if not self._too_heavy(heaviest, lightest):
                return

    def _too_heavy(self, heaviest: WorkerId, lightest: WorkerId) -> bool:
        return self._loads[heaviest] > REBALANCE_FACTOR * self._loads[lightest]
