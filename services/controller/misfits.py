"""Compositions that a node cannot serve, and those that it should not be changed to. Pure."""

from shared.contracts.events import NodeRegistered
from shared.model.lattice import Composition, groups_of
from shared.model.pool import Node


def misfit(spec: NodeRegistered, composition: Composition) -> str | None:
    """Why a node cannot serve a composition, or None."""
    try:
        groups_of(composition)
    except ValueError as error:
        return str(error)
    if sum(composition) != spec.prefill_ranks:
        return f"composition {composition}: {sum(composition)} ranks, but node {spec.node} has {spec.prefill_ranks}"
    if strange := set(composition) - set(spec.degrees):
        return f"composition {composition}: degrees {sorted(strange)} are not among {spec.degrees} of node {spec.node}"
    return None


def too_small(node: Node, spec: NodeRegistered, composition: Composition) -> str | None:
    """Why a node should not go to a composition that it could serve, or None. Workers that it has may stay."""
    coming = set(groups_of(composition)) - set(groups_of(node.composition))
    if not (small := {group.degree for group in coming if group.degree < spec.degree_min}):
        return None
    tokens = min(small) * spec.blocks_per_rank * spec.block_tokens
    return (
        f"composition {composition}: a worker of degree {min(small)} holds {tokens} tokens of KV, less than one step computes"
        f" of a prompt; workers of node {spec.node} need a degree of {spec.degree_min}"
    )
