"""The pool as clients see it: which model, under which limits. Pure."""

from typing import NamedTuple

from services.router.decider import State
from services.router.roster import serving
from shared.model.cost import first_version


class Offer(NamedTuple):
    """What the pool serves, as its nodes registered it. A prompt and its answer together have one token more than the
    longest prompt, or fewer. `engines` may be of several kinds, and a request may come to any of them."""

    model: str
    block_tokens: int
    prompt_tokens_max: int
    engines: frozenset[str]

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens_max + 1


def offered(state: State) -> Offer | None:
    """What the pool serves, or last served if no node lives now; None before the first node."""
    specs = [node.spec for node in state.pool.nodes.values() if node.spec is not None]
    if not specs:
        return None
    spec = serving(state.pool) or specs[0]
    alike = [each for each in specs if each.model == spec.model]
    longest = max(each.prompt_tokens_max for each in alike)
    return Offer(spec.model, spec.block_tokens, longest, frozenset(each.engine for each in alike))


def schedulable_workers(state: State) -> int:
    """How many workers may be given something new."""
    return sum(state.pool.schedulable(worker) for worker in state.pool.workers.values())


def mispriced_nodes(state: State) -> int:
    """Living nodes that were started with other coefficients than those that price them here, or began to."""
    specs = [node.spec for node in state.pool.nodes.values() if node.alive and node.spec is not None]
    priced_by = first_version(state.coefficients.version)
    return sum(spec.coefficients_version != priced_by for spec in specs)
