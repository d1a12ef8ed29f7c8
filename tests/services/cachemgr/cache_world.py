"""A story that a cache manager folds: blocks have names, times are easy sums."""

from functools import partial
from hashlib import blake2b

from services.cachemgr.decider import evolve, initial
from shared.contracts.events import BlockRun, BlocksEvicted, BlocksStored
from shared.contracts.ids import BlockId, WorkerId
from shared.model.cost import Coefficients
from tests.support.story import Story, received

ROUND = Coefficients(version="round", d=0.0, a=1e-3, b=1e-4, c=4e-3, alpha=0.0)
"""1,000 uncached tokens take 1 s + 4 s / C; 1,000 cached ones 0.1 s. Blocks have 100 tokens: reusing one more saves
0.1 + 0.4 / C - 0.01 s, which is 0.49 s at degree 1 and 0.19 s at degree 4."""


def block(name: str) -> BlockId:
    return BlockId(blake2b(name.encode(), digest_size=16).digest())


def chain(names: str) -> list[BlockId]:
    """`"a b c"`: three blocks of one path."""
    return [block(name) for name in names.split()]


class CacheStory(Story):
    """`state` has folded everything told."""

    def __init__(self) -> None:
        self.state = initial(ROUND)
        self._numbers: dict[str, int] = {}
        super().__init__(partial(evolve, self.state))

    def receives(self, request: str, names: str, prompt_tokens: int) -> None:
        self.tell(received(request, prompt_tokens, block_ids=b"".join(chain(names))))

    def stores(self, worker: str, names: str, below: str | None = None, cause: str = "replication") -> None:
        """`worker` holds these blocks of one path from now on; the first lies below `below`."""
        blocks = chain(names)
        run = BlockRun(parent=block(below) if below else None, block_ids=b"".join(blocks))
        self.tell(
            BlocksStored(
                worker=WorkerId(worker),
                incarnation=1,
                number=self._number(worker),
                cause=cause,
                blocks=len(blocks),
                runs=(run,),
            )
        )

    def evicts(self, worker: str, names: str) -> None:
        self.tell(
            BlocksEvicted(
                worker=WorkerId(worker),
                incarnation=1,
                number=self._number(worker),
                cause="pressure",
                block_ids=b"".join(chain(names)),
            )
        )

    def demand(self, name: str, degree: int) -> tuple[float, float]:
        """(access, missed seconds) of a block at a degree."""
        found = self.state.trie.demand(self.state.trie.nodes[block(name)])
        index = (1, 2, 4, 8).index(degree)
        return found.access[index], found.missed[index]

    def _number(self, worker: str) -> int:
        self._numbers[worker] = self._numbers.get(worker, 0) + 1
        return self._numbers[worker]
