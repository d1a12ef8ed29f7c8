"""Who is in the pool, as columns: a row for each worker, in the order of their ids, so that the lower of equals comes first.

What only the pool's own events change is worked out here, once after each of them, and not for every request. The rest of a
decision (`board.py`, `outlook.py`, `pricing.py`) is arithmetic on whole columns. Array names end in their axes: W is workers.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from shared.contracts.events import Exclusion, NodeRegistered
from shared.contracts.ids import NodeId, WorkerId
from shared.model.cost import Ints
from shared.model.pool import Node, Pool, Worker

DIGEST_BYTES, DIGEST_VERSION = 16, 2
"""Of the digest of all prices, which a decision records."""

REASONS: tuple[Exclusion, ...] = get_args(Exclusion)

Bools = npt.NDArray[np.bool_]


class Rows(dict[WorkerId, int]):
    """The row of each worker. All strangers are in one more row, after the last."""

    def __missing__(self, worker: WorkerId) -> int:
        return len(self)


class Roster:
    """Workers and their degrees."""

    def __init__(self, workers: Iterable[tuple[WorkerId, int]]) -> None:
        listed = sorted(workers)
        self.workers = tuple(worker for worker, _ in listed)
        self.rows = Rows(zip(self.workers, range(len(listed)), strict=True))
        self.all_W = np.arange(len(listed))
        self.degree_of = tuple(degree for _, degree in listed)
        self.degree_W: Ints = np.array(self.degree_of, dtype=np.int64)
        self.smallest = min(self.degree_of, default=1)
        self._part: tuple[bytes, Roster] | None = None

    def digest(self, price_us_W: Ints, version: int = DIGEST_VERSION) -> str:
        """Of the workers' prices. Version 1 is over text, a line for each worker; 2 is over the workers' names and then over
        the prices as they lie in memory, 64 bits each and little-endian."""
        if version == 1:
            lines = "\n".join(map("{} {}".format, self.workers, price_us_W.tolist()))
            return blake2b(lines.encode(), digest_size=DIGEST_BYTES).hexdigest()
        hashed = self._named.copy()
        hashed.update(price_us_W.astype("<i8", copy=False).tobytes())
        return hashed.hexdigest()

    @cached_property
    def _named(self) -> blake2b:
        return blake2b("".join(f"{worker}\n" for worker in self.workers).encode(), digest_size=DIGEST_BYTES)

    def only(self, rows_W: Ints) -> "Roster":
        """Those in these rows. The last answer is kept: who may not be chosen now may seldom be chosen a moment later."""
        key = rows_W.tobytes()
        if self._part is None or self._part[0] != key:
            degrees = self.degree_W[rows_W].tolist()
            self._part = key, Roster(zip([self.workers[row] for row in rows_W.tolist()], degrees, strict=True))
        return self._part[1]


class Members(NamedTuple):
    """The pool's workers, and what keeps requests from them, as places in `REASONS` where it does.

    `node_bar_W` is why nothing goes to the node, `bar_W` why nothing goes to the worker, -1 if something does. A prompt may
    have `prompt_tokens_W` at most, and its KV fits if it has no more than `room_tokens_W`. Nobody is barred from prompts of up
    to `free_tokens`. `counted` is how many workers the load of the pool is divided by.
    """

    spec: NodeRegistered | None
    roster: Roster
    rows_of: Mapping[NodeId, Ints]
    node_bar_W: Ints
    bar_W: Ints
    prompt_tokens_W: Ints
    room_tokens_W: Ints
    free_tokens: int
    can_fetch_W: Bools
    counted: int

    def takes(self, worker: WorkerId, prompt_tokens: int) -> bool:
        """Whether nothing here keeps a prompt of so many tokens from the worker."""
        row = self.roster.rows.get(worker)
        if row is None or self.node_bar_W[row] >= 0 or self.bar_W[row] >= 0:
            return False
        return bool(prompt_tokens <= min(self.prompt_tokens_W[row], self.room_tokens_W[row]))


def serving(pool: Pool) -> NodeRegistered | None:
    """What the pool serves: the registration of its first living node. A node that serves something else gets no work."""
    alive = [node for node in pool.nodes.values() if node.alive and node.spec is not None]
    return min(alive, key=lambda node: node.id).spec if alive else None


def members(pool: Pool, specs: Mapping[NodeId, NodeRegistered]) -> Members:
    """As of now. `specs` are the nodes' newest registrations."""
    spec = serving(pool)
    found = sorted(
        ((worker, node) for node in pool.nodes.values() for worker in node.workers), key=lambda each: each[0].id
    )
    rows_of: dict[NodeId, list[int]] = {}
    for row, (_, node) in enumerate(found):
        rows_of.setdefault(node.id, []).append(row)
    node_bars = {node.id: _place_of(_node_excluded(node, spec)) for node in pool.nodes.values()}
    bars = [_place_of(_worker_excluded(worker, node)) for worker, node in found]
    prompts = [node.spec.prompt_tokens_max if node.spec else 0 for _, node in found]
    rooms = [_room_tokens(worker, node) for worker, node in found]
    open_to_all = all(bar < 0 for bar in (*node_bars.values(), *bars))
    return Members(
        spec=spec,
        roster=Roster((worker.id, worker.degree) for worker, _ in found),
        rows_of={node: _ints(rows) for node, rows in rows_of.items()},
        node_bar_W=_ints(node_bars[node.id] for _, node in found),
        bar_W=_ints(bars),
        prompt_tokens_W=_ints(prompts),
        room_tokens_W=_ints(rooms),
        free_tokens=min((*prompts, *rooms), default=0) if open_to_all else 0,
        can_fetch_W=np.array(
            [(of := specs.get(node.id)) is not None and of.fetches for _, node in found], dtype=np.bool_
        ),
        counted=sum(len(node.workers) for node in pool.nodes.values() if node.alive and not node.cordoned),
    )


def _node_excluded(node: Node, spec: NodeRegistered | None) -> Exclusion | None:
    """Why no worker of this node can take any request."""
    if not node.alive or node.spec is None or spec is None or not _serves_the_same(node.spec, spec):
        return "not-schedulable"
    return "cordoned" if node.cordoned else None


def _worker_excluded(worker: Worker, node: Node) -> Exclusion | None:
    if worker.id in node.draining:
        return "draining"
    return None if node.has_adopted(worker) else "stale-epoch"


def _room_tokens(worker: Worker, node: Node) -> int:
    """The longest prompt whose blocks fit on a worker."""
    if node.spec is None:
        return 0
    return (
        node.spec.blocks_per_rank * node.spec.block_tokens * (worker.degree if node.spec.kv_layout == "cyclic" else 1)
    )


def _serves_the_same(one: NodeRegistered, other: NodeRegistered) -> bool:
    return one is other or (
        (one.model, one.model_revision, one.tokenizer_revision, one.block_tokens)
        == (other.model, other.model_revision, other.tokenizer_revision, other.block_tokens)
    )


def _place_of(reason: Exclusion | None) -> int:
    return -1 if reason is None else REASONS.index(reason)


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)
