"""A story that a cache manager folds: blocks have names, times are easy sums."""

from functools import partial
from hashlib import blake2b

from services.cachemgr.decider import State, evolve, initial, scan
from shared.contracts.envelope import EventData
from shared.contracts.events import (
    BlockRun,
    BlocksEvicted,
    BlocksStored,
    ParametersChanged,
    ReclamationRequested,
    ReplicationRequested,
)
from shared.contracts.ids import BlockId, WorkerId
from shared.model.cost import Coefficients
from tests.support.story import Story, assigned, completed, prefilled, received, serving

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

    def __init__(self, state: State | None = None) -> None:
        self.state = state or initial(ROUND)
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


# --- a pool whose scans follow Algorithm 2: n0 has workers of degree 1, 1 and 2, n1 and n2 one of degree 4

ONE, OTHER_ONE, TWO = (WorkerId(f"n0/1/{rank}") for rank in (0, 1, 2))
FOUR, OTHER_FOUR = WorkerId("n1/1/0"), WorkerId("n2/1/0")


def pool() -> list[EventData]:
    return [*serving("n0", (1, 1, 2)), *serving("n1", (4,)), *serving("n2", (4,))]


def paper_pool() -> CacheStory:
    told = CacheStory()
    told.tell(*pool(), changes("paper"))
    return told


def changes(policy: str, version: int = 1, **more: float) -> ParametersChanged:
    return ParametersChanged(
        parameters_version=version, changes={"cache_policy": policy, **more}, asked_by="ann", reason=""
    )


def copies(story: CacheStory) -> list[ReplicationRequested]:
    return [each for each in scan(story.state) if isinstance(each, ReplicationRequested)]


def reclaims(story: CacheStory) -> list[ReclamationRequested]:
    return [each for each in scan(story.state) if isinstance(each, ReclamationRequested)]


def misses(story: CacheStory, request: str, names: str, degree: int, worker: str = ONE) -> None:
    """A request for a prompt of these blocks would rather go to `degree`; it was served elsewhere and is over."""
    tokens = 100 * len(names.split()) + 50
    story.receives(request, names, tokens)
    story.tell(assigned(request, worker, tokens, preferred_degree=degree), completed(request, worker, 1))


def reuses(story: CacheStory, request: str, names: str, worker: str) -> None:
    tokens = 100 * len(names.split())
    story.receives(request, names, tokens + 50)
    story.tell(
        assigned(request, worker, 50, tokens, preferred_degree=4),
        prefilled(request, worker, 50, cached_own_tokens=tokens),
    )
    story.tell(completed(request, worker, 1))
