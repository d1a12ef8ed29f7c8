"""Prompts, caches and loads that a rule of ours and the router that it stands for are both shown."""

from collections.abc import Sequence
from random import Random

from shared.contracts.ids import BlockId, WorkerId
from simulation.baselines.rule import Prompt, WorkerView

BLOCK_TOKENS = 16
PREFIXES, PREFIX_BLOCKS, MESSAGE_BLOCKS = 24, (4, 40), 30
CAPACITY_BLOCKS = 1 << 20

OPEN_MAX = 500
"""Requests that may be outstanding: enough for one worker to have 64 more than another."""


class World:
    """Prompts of two dozen prefixes, Zipf, with messages of their own. Nothing is evicted."""

    def __init__(self, workers: int, chance: Random) -> None:
        self.workers = [WorkerId(str(index)) for index in range(workers)]
        self._chance = chance
        self._blocks = 0
        self._prefixes = [self._fresh(chance.randint(*PREFIX_BLOCKS)) for _ in range(PREFIXES)]
        self._cached: dict[WorkerId, set[BlockId]] = {worker: set() for worker in self.workers}
        self._open: list[tuple[Prompt, WorkerId, int]] = []
        self._room = 0

    def prompt(self) -> Prompt:
        """The next one; a last partial block has no name."""
        weights = [rank**-1.5 for rank in range(1, PREFIXES + 1)]
        [prefix] = self._chance.choices(self._prefixes, weights)
        chain = [*prefix, *self._fresh(self._chance.randint(0, MESSAGE_BLOCKS))]
        tokens = len(chain) * BLOCK_TOKENS + self._chance.randrange(BLOCK_TOKENS)
        return Prompt(tokens, chain, BLOCK_TOKENS, 0)

    def views(self, prompt: Prompt) -> list[WorkerView]:
        """All workers, as an exact index and exact counts see them."""
        views = []
        for worker in self.workers:
            own = [uncached for _, placed, uncached in self._open if placed == worker]
            cached = self._cached_blocks(prompt, worker)
            views.append(WorkerView(worker, 4, cached, 0, len(own), sum(own), 0, CAPACITY_BLOCKS))
        return views

    def placed(self, prompt: Prompt, worker: WorkerId) -> None:
        """It is outstanding there. How many may be so wanders between none and `OPEN_MAX`."""
        uncached = prompt.tokens - self._cached_blocks(prompt, worker) * BLOCK_TOKENS
        self._open.append((prompt, worker, uncached))
        self._room = min(OPEN_MAX, max(0, self._room + self._chance.randint(-40, 42)))

    def crowded(self) -> bool:
        """Something has to end before the next one comes."""
        return len(self._open) > self._room

    def finish(self) -> tuple[int, Prompt, WorkerId]:
        """One of the open requests has its first token, and its worker the prompt's blocks: where it was, and what."""
        at = self._chance.randrange(len(self._open))
        prompt, worker, _ = self._open.pop(at)
        self._cached[worker].update(prompt.chain)
        return at, prompt, worker

    def _cached_blocks(self, prompt: Prompt, worker: WorkerId) -> int:
        held = self._cached[worker]
        return next((i for i, block in enumerate(prompt.chain) if block not in held), len(prompt.chain))

    def _fresh(self, count: int) -> list[BlockId]:
        begin, self._blocks = self._blocks, self._blocks + count
        return [BlockId(number.to_bytes(16, "big")) for number in range(begin, self._blocks)]


def block_number(block: BlockId) -> int:
    return int.from_bytes(block, "big")


def token_ids(prompt: Prompt) -> Sequence[int]:
    """Tokens that name their block, and at the end some of nobody's."""
    whole = [block_number(block) * BLOCK_TOKENS + i for block in prompt.chain for i in range(BLOCK_TOKENS)]
    return whole + [0] * (prompt.tokens - len(whole))
