"""A placement as it is recorded: where a request goes, and every input of that decision."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from services.router import decode_ranks
from services.router.board import Board
from services.router.placement import Placement, Question
from shared.contracts.events import Exclusion, PricedCandidate, RequestAssigned
from shared.contracts.ids import NodeId, RequestId, WorkerId, node_of
from shared.contracts.made import made

if TYPE_CHECKING:
    from services.router.decider import Moment, State


def assigned(
    state: "State",
    request: RequestId,
    attempt: int,
    question: Question,
    placed: tuple[Placement, Mapping[WorkerId, Exclusion]],
    moment: "Moment",
) -> RequestAssigned:
    placement, excluded = placed
    winner = placement.winner
    fields = {
        "request": request,
        "attempt": attempt,
        "worker": winner.worker,
        "degree": winner.degree,
        "decode_worker": _decode_worker(state, node_of(winner.worker), question),
        "policy": placement.policy,
        "uncached_tokens": question.prompt_tokens - winner.cached_tokens,
        "cached_tokens": winner.cached_tokens,
        "service_us": winner.service_us,
        "queue_us": winner.queue_us,
        "beta": placement.beta,
        "lam": placement.lam,
        "load": placement.load,
        "ratio": winner.ratio,
        "ratio_in_own_time": placement.ratio_in_own_time,
        "preferred_degree": placement.preferred_degree,
        "candidates": placement.candidates,
        "excluded": dict(Counter(excluded.values())) if excluded else {},
        "price_digest": placement.prices.digest(moment.digest_version),
        "digest_version": moment.digest_version,
        "fetch_from": winner.fetch_from,
        "fetch_blocks": _fetch_blocks(state.board, winner),
        "parameters_version": state.parameters.version,
        "coefficients_version": state.coefficients.version,
        "seen_seq": moment.seen_seq,
        "now_ns": moment.now_ns,
    }
    return made(RequestAssigned, fields)


def _fetch_blocks(board: Board, winner: PricedCandidate) -> int:
    """How many leading blocks the source has."""
    spec = board.members.spec
    return winner.cached_tokens // spec.block_tokens if winner.fetch_from is not None and spec is not None else 0


def _decode_worker(state: "State", node: NodeId, question: Question) -> WorkerId | None:
    """The one that goes on from a prefill on `node`; None if nobody does."""
    return decode_ranks.cheapest(state.pool, state.loads, node, question.silent)
