"""Another system's rule in the place of the router's own: the same events, holders, loads and exclusions, another choice.

`Placing` stands where `services.router.decider` does: `evolve`, `receive` and `assign_again` have its signatures. What it
adds to the router's state are the sums that only such rules ask for. The recorded price is what our model says of the chosen
worker, so that reservations, audits and explanations go on as they are.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from services.router import decider
from services.router.decider import Arrival, Moment, State
from services.router.open_requests import OpenRequest
from services.router.outlook import plain, weights
from services.router.placement import Able, Placement, Question, choose
from services.router.pricing import Ways
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import (
    Exclusion,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    RequestReceived,
    RouterLost,
)
from shared.contracts.ids import RequestId, WorkerId, node_of
from simulation.baselines.rule import Prompt, Rule, WorkerView


class _Placed(NamedTuple):
    """One outstanding assignment."""

    worker: WorkerId
    uncached_tokens: int


class Placing:
    """One router's use of a rule. Its memory: an entry for each outstanding request and each busy worker."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._placed: dict[RequestId, _Placed] = {}
        self._uncached_tokens: Counter[WorkerId] = Counter()
        self._waits = False

    def evolve(self, state: State, stored: Stored) -> None:
        """Fold one event into the router's state, and tell the rule what it says of placements."""
        decider.evolve(state, stored)
        match stored.data:
            case RouterLost() | NodeRegistered() | NodeLost() | NodeDeclaredLost():
                for request in list(self._placed):
                    self._settle(state, request, stored)
            case RequestReceived():
                pass
            case data if named := getattr(data, "request", None):
                self._settle(state, named, stored)
            case _:
                pass

    def receive(self, state: State, arrival: Arrival, moment: Moment) -> list[EventData]:
        """As `decider.receive`. A request that the rule lets wait is received, and nothing more: `assign_again` places it."""
        facts = decider.receive(state, arrival, moment, self.place)
        return facts[:1] if self._waits else facts

    def assign_again(self, state: State, request: RequestId, generated_tokens: int, moment: Moment) -> list[EventData]:
        """As `decider.assign_again`; also for what `receive` let wait, in order of arrival."""
        return decider.assign_again(state, request, generated_tokens, moment, self.place)

    def place(self, state: State, question: Question) -> tuple[Placement | None, Mapping[WorkerId, Exclusion]]:
        """The rule's choice among the workers that may have the request."""
        able, excluded, cached_W = decider.look(state, question)
        self._waits = False
        if able is None:
            return None, excluded
        rows = state.board.roster.rows
        block_tokens = _block_tokens(state, able.roster.workers[0])
        prompt = Prompt(question.prompt_tokens, question.chain, block_tokens, question.now_ns)
        views = [self._view(state, each, int(cached_W[rows[each]]), block_tokens) for each in able.roster.workers]
        chosen = self._rule.choose(prompt, views)
        if chosen is None:
            self._waits = True
            return None, excluded
        row_W = np.array([rows[chosen]])
        alone = Able(state.board.roster.only(row_W), row_W)
        outlook = decider.look_out(state, question.now_ns)._replace(weights=weights(state.parameters))
        priced = plain(outlook, alone.roster.smallest, question, Ways(cached_W))
        placement = choose(alone, priced, state.holders.trust)
        return placement._replace(policy=self._rule.name), excluded

    def _view(self, state: State, worker: WorkerId, cached_tokens: int, block_tokens: int) -> WorkerView:
        load = state.loads.of_worker.get(worker)
        running = load.running.values() if load else ()
        return WorkerView(
            worker=worker,
            degree=state.pool.workers[worker].degree,
            cached_blocks=cached_tokens // block_tokens,
            queued_requests=len(load.line) if load else 0,
            running_requests=len(running),
            uncached_tokens=self._uncached_tokens[worker],
            running_blocks=sum(-(-each.prompt_tokens // block_tokens) for each in running),
            capacity_blocks=_capacity_blocks(state, worker),
        )

    def _settle(self, state: State, request: RequestId, stored: Stored) -> None:
        """Follow the router's fold: what it says of the request now, against what is counted for it."""
        before = self._placed.get(request)
        opened = state.loads.open.get(request)
        now = _outstanding(opened) if opened else None
        if before == now:
            return
        if before is not None:
            del self._placed[request]
            self._count(before, -1)
            self._rule.ended(request, before.worker)
        if now is not None and opened is not None:
            self._placed[request] = now
            self._count(now, 1)
            chain = state.holders.chains.get(request, ())
            prompt = Prompt(opened.prompt_tokens, chain, _block_tokens(state, now.worker), stored.event.time_ns)
            self._rule.placed(request, prompt, now.worker)

    def _count(self, placed: _Placed, sign: int) -> None:
        self._uncached_tokens[placed.worker] += sign * placed.uncached_tokens
        if not self._uncached_tokens[placed.worker]:
            del self._uncached_tokens[placed.worker]


def _outstanding(opened: OpenRequest) -> _Placed | None:
    assignment = opened.assignment
    if assignment is None or assignment.prefilled:
        return None
    return _Placed(assignment.worker, assignment.uncached_tokens)


def _block_tokens(state: State, worker: WorkerId) -> int:
    return state.loads.specs[node_of(worker)].block_tokens


def _capacity_blocks(state: State, worker: WorkerId) -> int:
    found = state.pool.workers[worker]
    spec = state.pool.nodes[found.node].spec
    assert spec is not None, "an eligible worker's node is registered"
    return spec.blocks_per_rank * (found.degree if spec.kv_layout == "cyclic" else 1)
