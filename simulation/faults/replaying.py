"""The log of a run that has come to rest: every decision made again, and every state folded anew."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from replay.beginnings import registration
from replay.findings import Findings
from replay.verifying import EVERYTHING, LogVerifier
from services.cachemgr import decider as cache_decider
from services.cachemgr import hosting as cachemgr
from services.cachemgr.trie import Trie
from services.controller import decider as control_decider
from services.controller import hosting as controller
from services.router import decider as router_decider
from services.router import hosting as router
from shared.model.prefix_index import PrefixIndex
from simulation.faults.checkers import Violation
from simulation.faults.scene import Scene

ELSEWHERE = frozenset({"watcher", "seen_seq"})
"""Fields that hold no part of a state: who is told of changes, and how far a process has folded."""


def check_decisions(scene: Scene) -> int:
    """How many decisions came out again; all of them must, and some must be there. Errors: Violation, AssertionError."""
    findings, events = Findings(), scene.checker.events
    begun = [found for stored in events if (found := registration(stored)) is not None]
    verifier = LogVerifier(scene.outside.log.identity, begun, EVERYTHING, findings)
    for stored in events:
        verifier.fold(stored)
    verifier.end()
    verifier.check()
    if not findings.clean:
        raise Violation(f"verify: {'; '.join(map(str, findings.differences[:3]))}")
    if not findings.checked["request-assigned"] or findings.skipped:
        raise Violation(f"verify: {dict(findings.checked)} checked, {dict(findings.skipped)} skipped")
    return findings.checked.total()


def check_folds(scene: Scene) -> None:
    """The log, folded anew, gives every living state. Errors: Violation."""
    routers = [(place.name, hosted.state) for place, hosted in scene.hosted(router.Hosted)]
    controllers = [(place.name, hosted.state) for place, hosted in scene.hosted(controller.Hosted)]
    managers = [(place.name, hosted.state) for place, hosted in scene.hosted(cachemgr.Hosted)]
    coefficients = routers[0][1].coefficients
    anew: list[tuple[Any, Any, list[tuple[str, Any]]]] = [
        (router_decider.initial(coefficients), router_decider.evolve, [*routers]),
        (control_decider.initial(), control_decider.evolve, [*controllers]),
        (cache_decider.initial(coefficients), cache_decider.evolve, [*managers]),
    ]
    for state, evolve, living in anew:
        for stored in scene.checker.events:
            evolve(state, stored)
        for name, other in living:
            if (difference := differing("", state, other)) is not None:
                raise Violation(f"{name} is not what the log gives: {difference}")


def differing(path: str, one: Any, other: Any) -> str | None:
    """The path of the first part in which two states differ, and both parts. Orders of dictionaries do not count."""
    if is_dataclass(one) and type(one) is type(other):
        names = [each.name for each in fields(one) if each.compare and each.name not in ELSEWHERE]
        return _first((f"{path}.{name}", getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, Trie | PrefixIndex) and type(one) is type(other):
        return differing(path, _portrait(one), _portrait(other))
    if isinstance(one, dict) and isinstance(other, dict):
        if strange := one.keys() ^ other.keys():
            return f"{path}: only one has {sorted(map(str, strange))[:3]}"
        return _first((f"{path}[{key!r}]", value, other[key]) for key, value in one.items())
    return None if one == other else f"{path}: {one!r:.200} and {other!r:.200}"


def _first(parts: Iterable[tuple[str, Any, Any]]) -> str | None:
    return next((found for part in parts if (found := differing(*part)) is not None), None)


def _portrait(tree: Trie | PrefixIndex[Any]) -> dict[Any, Any]:
    """What it says, whatever runs or order it says it in."""
    if isinstance(tree, PrefixIndex):
        return {holder: dict(tree.held(holder)) for holder in tree.counts}
    return {block: (node.depth, node.replicas, *tree.demand(node)) for block, node in tree.nodes.items()}
