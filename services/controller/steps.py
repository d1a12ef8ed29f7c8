"""Single steps between compositions: which there are, what each costs, and what a policy may see of a pool.

A step splits one worker in halves or merges two buddies. Its *drain* is how long the retiring workers will still be busy.
Its *traffic* is what the coming workers lack, counted in blocks as often as they were lately reused: where a layout spreads a
worker's blocks over its ranks (`cyclic`), half of each prefix lies on the sibling after a split, and a merge lacks nothing;
where every rank has all of them (`replicated`), a split lacks nothing and a merge keeps only what both siblings had, of which
the log does not tell, so all of it counts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from shared.contracts.events import Alternative, WindowClosed
from shared.contracts.ids import NodeId
from shared.model.lattice import Composition, Group, groups_of, merges, splits
from shared.model.parameters import Parameters

Kind = Literal["split", "merge"]

DRAINS_EQUAL_US = 100_000
"""Drains that differ by less are taken for equal (paper, section 4.3)."""


class WorkerSight(NamedTuple):
    """One worker: its κ_C for the window, how long what runs there lasts, and how many blocks it lately reused."""

    group: Group
    capacity_us: int
    drain_us: int = 0
    reused_blocks: int = 0


class NodeSight(NamedTuple):
    """One serving node. `movable` says that a policy may change it now; `rank_tokens` is what one rank's KV memory holds."""

    node: NodeId
    composition: Composition
    degrees: tuple[int, ...]
    workers: tuple[WorkerSight, ...]
    cyclic: bool = True
    movable: bool = True
    rank_tokens: int = 1
    prompt_tokens_max: int = 1

    def holds_tokens(self, composition: Composition) -> int:
        """The longest prompt that a composition of this node can take."""
        ranks = max(composition) if self.cyclic else 1
        return min(self.prompt_tokens_max, ranks * self.rank_tokens)


class Sight(NamedTuple):
    """All that a policy decides on: the window that has closed, the parameters, the nodes, and κ_C by degree for a window of
    that length. `moving` counts the nodes that are being reconfigured."""

    window: WindowClosed
    parameters: Parameters
    nodes: tuple[NodeSight, ...]
    capacities_us: Mapping[int, int]
    moving: int = 0


class Step(NamedTuple):
    """One step of one node, with the pool's capacity after it for the window."""

    node: NodeId
    composition: Composition
    drain_us: int
    missing_blocks: int
    capacity_us: int
    holds_tokens: int

    def alternative(self) -> Alternative:
        return Alternative(
            node=self.node,
            composition=self.composition,
            drain_us=self.drain_us,
            missing_blocks=self.missing_blocks,
            capacity_us=self.capacity_us,
        )


def steps(sight: Sight, kind: Kind) -> Iterator[Step]:
    """Every step of a kind that the topology allows on a node that may move, in node order and from rank 0 up."""
    for node in sight.nodes:
        if not node.movable:
            continue
        compositions = splits if kind == "split" else merges
        for composition in compositions(node.composition, node.degrees):
            yield _step(sight, node, composition, kind)


def _step(sight: Sight, node: NodeSight, composition: Composition, kind: Kind) -> Step:
    coming = set(groups_of(composition)) - set(groups_of(node.composition))
    retiring = [each for each in node.workers if each.group not in groups_of(composition)]
    change_us = sum(sight.capacities_us[group.degree] for group in coming) - sum(each.capacity_us for each in retiring)
    reused = sum(each.reused_blocks for each in retiring)
    lacking = {("split", True): reused // 2, ("merge", False): reused}.get((kind, node.cyclic), 0)
    others = (each.holds_tokens(each.composition) for each in sight.nodes if each.node != node.node)
    return Step(
        node.node,
        composition,
        max(each.drain_us for each in retiring),
        lacking,
        sight.window.capacity_us + change_us,
        max([node.holds_tokens(composition), *others]),
    )


def holds_tokens(nodes: Sequence[NodeSight]) -> int:
    """The longest prompt that the pool can take now."""
    return max((each.holds_tokens(each.composition) for each in nodes), default=0)


def ranked(found: Iterable[Step]) -> list[Step]:
    """Best first: least drain, where drains within 100 ms of the least count as equal; then least traffic; then in order."""
    steps = list(found)
    least_us = min((each.drain_us for each in steps), default=0)

    def key(step: Step) -> tuple[int, int, NodeId, Composition]:
        late_us = step.drain_us if step.drain_us - least_us > DRAINS_EQUAL_US else 0
        return late_us, step.missing_blocks, step.node, step.composition

    return sorted(steps, key=key)
