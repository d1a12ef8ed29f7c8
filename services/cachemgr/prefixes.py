"""`GET /v1/prefixes?limit=…`: the hottest prefixes, for operators. Ids are keyed hashes; they say nothing of any prompt."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from services.cachemgr.decider import State
from services.cachemgr.node import Demand, Node
from shared.contracts.ids import WorkerId
from shared.model.lattice import DEGREES

PREFIXES_MAX = 1_000


class Prefix(BaseModel):
    """One node of the trie. `replicas`, `access` and `missed_s` are by degree; degrees with none are left out. `pending` are
    the workers that a split has left it to, and that have yet to bring it."""

    block: str
    parent: str | None
    depth: int
    holders: list[WorkerId]
    pending: list[WorkerId]
    replicas: dict[int, int]
    access: dict[int, float]
    missed_s: dict[int, float]


class Prefixes(BaseModel):
    """The answer. `scan` and `seen_seq` say what it was true at; `nodes` is the size of the whole trie."""

    scan: int
    seen_seq: int
    nodes: int
    prefixes: list[Prefix]


def prefixes_api(state: State) -> APIRouter:
    """The route. Leader and standby answer alike."""
    router = APIRouter(prefix="/v1")

    @router.get("/prefixes")
    async def prefixes(limit: Annotated[int, Query(ge=1, le=PREFIXES_MAX)] = 20) -> Prefixes:
        return Prefixes(
            scan=state.trie.scan,
            seen_seq=state.seen_seq,
            nodes=len(state.trie.nodes),
            prefixes=[_prefix(state, node, demand) for node, demand in state.trie.hottest(limit)],
        )

    return router


def _prefix(state: State, node: Node, demand: Demand) -> Prefix:
    return Prefix(
        block=node.block.hex(),
        parent=node.parent.block.hex() if node.parent else None,
        depth=node.depth,
        holders=sorted(state.holders.index.holders(node.block)),
        pending=state.holders.pending.workers(node.block),
        replicas={degree: count for degree, count in zip(DEGREES, node.replicas, strict=True) if count},
        access={degree: value for degree, value in zip(DEGREES, demand.access, strict=True) if value},
        missed_s={degree: value for degree, value in zip(DEGREES, demand.missed, strict=True) if value},
    )
