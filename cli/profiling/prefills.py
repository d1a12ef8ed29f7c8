"""Single prefills on an engine, nothing else running: the worker at rank 0 is driven, every other rank is idle.

A prefix that is to be cached is computed and stored by that worker at that degree first, and looked up again before and
after each prefill that should find it: a measurement whose prefix was not resident is an error, not a slower point.
"""

from collections.abc import Sequence
from itertools import count

import numpy as np

from services.worker.engine.protocol import Engine, ItemResult, PrefillItem, PrefillStep
from shared.contracts.ids import BlockId, RequestId
from shared.model.blocks import Tokens, block_chain
from shared.model.lattice import DEGREES, Composition, Group

KEY = b"profile"


class NotResident(RuntimeError):
    """The worker could not keep the prefix that a prefill was to find: its KV memory is too small for this grid."""


def composition_with(degree: int, ranks: int) -> Composition:
    """Workers of this degree from rank 0 up, and as large ones as fit in the ranks that are left."""
    composition = [degree] * (ranks // degree)
    while (left := ranks - sum(composition)) > 0:
        composition.append(max(each for each in DEGREES if each <= left))
    return tuple(composition)


class Prefills:
    """A started engine. `chance` draws the tokens, ids in [0, `vocabulary`)."""

    def __init__(self, engine: Engine, vocabulary: int, chance: np.random.Generator) -> None:
        self._engine, self._vocabulary, self._chance = engine, vocabulary, chance
        self._description = engine.describe()
        self._epochs, self._requests = count(1), count(1)
        self._epoch, self._group = 0, Group(0, 0)
        self._prefixes: dict[int, Tokens] = {}

    async def use(self, degree: int) -> None:
        """From now on the worker at rank 0 has this degree."""
        if self._group.degree != degree:
            epoch = next(self._epochs)
            await self._engine.adopt(epoch, composition_with(degree, self._description.prefill_ranks))
            self._epoch, self._group = epoch, Group(0, degree)

    async def keep(self, cached_tokens: int) -> None:
        """Make the first `cached_tokens` tokens of this degree's own prefix resident; a whole number of blocks.

        Each degree has its own, because the KV of a prefix lies on the ranks that computed it. Errors: NotResident.
        """
        tokens, chain = self._prefix(cached_tokens)
        if chain and self._engine.cached_blocks(self._group, chain) < len(chain):
            await self._run(tokens, chain)
            self._check_resident(chain)

    async def prefill(self, uncached_tokens: int, cached_tokens: int) -> float:
        """Engine seconds of one prefill. What it computes anew is not stored. Errors: NotResident; EngineError."""
        prefix, chain = self._prefix(cached_tokens)
        self._check_resident(chain)
        seconds, item = await self._run(np.concatenate([prefix, self._draw(uncached_tokens)]), chain)
        if (item.cached_tokens, item.computed_tokens) != (cached_tokens, uncached_tokens):
            raise NotResident(f"{item.cached_tokens} of {cached_tokens} tokens were cached when the prefill ran")
        return seconds

    async def _run(self, tokens: Tokens, chain: Sequence[BlockId]) -> tuple[float, ItemResult]:
        item = PrefillItem(RequestId(f"profile-{next(self._requests)}"), tokens, tuple(chain))
        try:
            result = await self._engine.prefill(PrefillStep(self._epoch, self._group, (item,)))
        finally:
            self._engine.release(item.request)
        return result.seconds, result.items[0]

    def _prefix(self, cached_tokens: int) -> tuple[Tokens, list[BlockId]]:
        """The tokens and their chain. A longer prefix begins with the shorter ones."""
        known = self._prefixes.get(self._group.degree, np.empty(0, np.uint32))
        if len(known) < cached_tokens:
            known = np.concatenate([known, self._draw(cached_tokens - len(known))])
            self._prefixes[self._group.degree] = known
        tokens = known[:cached_tokens]
        return tokens, block_chain(tokens, self._description.block_tokens, KEY)

    def _draw(self, tokens: int) -> Tokens:
        return self._chance.integers(0, self._vocabulary, tokens, dtype=np.uint32)

    def _check_resident(self, chain: Sequence[BlockId]) -> None:
        held = self._engine.cached_blocks(self._group, chain)
        if held < len(chain):
            raise NotResident(f"the degree-{self._group.degree} worker holds {held} of a prefix of {len(chain)} blocks")
