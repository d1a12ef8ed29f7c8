"""A pool as a user writes it down: nodes, parameters, stragglers."""

from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import Any

from cli.parameters import parse_changes, unheeded
from shared.contracts.ids import NodeId
from shared.model import parameters as parameters_model
from shared.model.lattice import Composition, parse_composition
from shared.model.parameters import Parameters
from simulation.policies.control import FIXED
from simulation.policies.setup import Setup

NODES_MAX = 10_000
STRAGGLER_MIN, STRAGGLER_MAX = 0.1, 100.0
"""As the setting of a modelled node."""


def parse_nodes(texts: Sequence[str], gpus: int | None) -> tuple[Composition, ...]:
    """`2x4,4` is two nodes of two workers of degree 4. With `gpus` the list is repeated until it has that many.

    Errors: ValueError names what is wrong.
    """
    compositions: list[Composition] = []
    for text in texts:
        count, times, degrees = text.rpartition("x")
        if times and not (count.isdecimal() and 1 <= int(count) <= NODES_MAX):
            raise ValueError(f"--node {text}: {count!r} is no number of nodes up to {NODES_MAX}")
        compositions += [parse_composition(degrees)] * (int(count) if times else 1)
    if gpus is None:
        return tuple(compositions)
    found, repeated = 0, list[Composition]()
    for composition in islice(cycle(compositions), NODES_MAX):
        if found >= gpus:
            break
        repeated.append(composition)
        found += sum(composition)
    if found != gpus:
        raise ValueError(f"--gpus {gpus}: nodes of {'; '.join(texts)} come to {found}")
    return tuple(repeated)


def parse_parameters(texts: Sequence[str]) -> dict[str, Any]:
    """`lam=0` and the like. Errors: ValueError names the parameter and its limit."""
    try:
        changes = parse_changes(texts)
    except ValueError as error:
        raise ValueError(f"--set {error}") from None
    valid = parameters_model.changed(Parameters(), changes)
    return {name: getattr(valid, name) for name in changes}


def unheeded_by(setup: Setup, names: Iterable[str]) -> list[str]:
    """A line for each of the named parameters that nothing in this simulation reads."""
    parameters = Parameters.model_validate({**FIXED, **setup.parameters})
    if setup.rule is not None:
        parameters = parameters.model_copy(update={"placement_policy": setup.rule})
    return unheeded(parameters, names)


def parse_stragglers(texts: Sequence[str]) -> dict[NodeId, float]:
    """`n0=2` makes every step of node n0 take twice its time. Errors: ValueError."""
    factors: dict[NodeId, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            factor = factors[NodeId(name)] = float(value)
        except ValueError:
            raise ValueError(f"--straggler {text}: write it as node=factor") from None
        if not STRAGGLER_MIN <= factor <= STRAGGLER_MAX:
            raise ValueError(f"--straggler {text}: the factor is outside [{STRAGGLER_MIN}, {STRAGGLER_MAX}]")
    return factors
