"""Rest: what keeps a pool from it, and what must hold once it is there."""

from services.cachemgr import hosting as cachemgr
from services.controller import hosting as controller
from services.router import hosting as router
from services.worker.agent import NodeAgent
from shared.contracts.events import ENDS, RouterLost
from shared.model.holders import Holders, in_doubt
from simulation.faults.checkers import Violation
from simulation.faults.clients import Client, Outcome
from simulation.faults.place import Place
from simulation.faults.record import Copier
from simulation.faults.replaying import check_decisions, check_folds, differing
from simulation.faults.scene import Scene

UNRECORDED = "nothing"
"""The end in the log of a request that the log does not have."""

ANY_END = frozenset({"request-completed", "request-failed", "request-cancelled", "request-rejected"})

ENDS_OF: dict[Outcome, frozenset[str]] = {
    "served": frozenset({"request-completed"}),
    "failed": frozenset({"request-failed"}),
    "rejected": frozenset({"request-rejected", "request-failed"}),
    "refused": frozenset({UNRECORDED}),
    "left": ANY_END | {UNRECORDED},
    "broken": ANY_END | {UNRECORDED},
    "waiting": frozenset(),
}
"""What the log may say of a request whose client saw this. A router that died or was declared lost may not have told it."""


# --- what keeps a pool from rest


def not_serving(scene: Scene) -> str | None:
    """Why the pool could not serve, whatever else goes on; None if it could."""
    for place in scene.places.values():
        if place.service is None:
            return f"{place.name} is not up"
    for place, hosted in scene.hosted(router.Hosted):
        idle = [each.id for each in hosted.state.pool.workers.values() if not hosted.state.pool.schedulable(each)]
        if (reason := hosted.dispatcher.not_ready()) or idle:
            return f"{place.name}: {reason or f'{idle} are not schedulable'}"
    for place, agent in scene.hosted(NodeAgent):
        if (reason := agent.ready()) is not None:
            return f"{place.name}: {reason}"
    for place, control in scene.hosted(controller.Hosted):
        unserved = [node.id for node in control.state.pool.nodes.values() if not node.alive or not node.epoch]
        if control.state.sagas.open or unserved or not control.state.term:
            return f"{place.name}: {sorted(control.state.sagas.open)} change, {unserved} have no epoch"
    return None


def restless(scene: Scene) -> str | None:
    """What is still under way, or None."""
    if (reason := not_serving(scene)) is not None:
        return reason
    if scene.checker.open_requests:
        return f"{scene.checker.open_requests} requests have no end"
    if scene.record.checkpoint.stream_seq != len(scene.checker.events):
        return f"the ledger has {scene.record.checkpoint.stream_seq} events of {len(scene.checker.events)}"
    for place in scene.places.values():
        if place.process is None or not all(tail.drained for tail in place.process.log.tails):
            return f"{place.name} has not everything that the log has"
    for place, hosted in scene.hosted(router.Hosted):
        if hosted.outbox.events or hosted.dispatcher.open_requests:
            return f"{place.name}: {hosted.outbox.events} events, {hosted.dispatcher.open_requests} requests"
        if doubts := in_doubt(hosted.state.holders, hosted.state.pool.alive):
            return f"{place.name}: the caches of {sorted(doubts)} are in doubt"
    for place, manager in scene.hosted(cachemgr.Hosted):
        if doubts := in_doubt(manager.state.holders, manager.state.pool.alive):
            return f"{place.name}: the caches of {sorted(doubts)} are in doubt"
    for place, agent in scene.hosted(NodeAgent):
        if (jobs := len(agent.projection.state.desk)) or agent.unstored_events:
            return f"{place.name}: {jobs} jobs, {agent.unstored_events} events"
    return None


# --- what must hold at rest


def check_rest(scene: Scene) -> None:
    """Everything that must hold at rest. Errors: Violation, AssertionError."""
    _check_clients(scene)
    for place, hosted in scene.hosted(router.Hosted):
        loads = hosted.state.loads
        if loads.open or loads.of_worker or loads.output_tokens:
            raise Violation(f"{place.name}: reservations are left: {loads.of_worker}, {loads.output_tokens}")
        _check_gauges(place, "vertumnus_router_open_requests", "vertumnus_router_held_prompt_bytes")
    check_caches(scene)
    scene.verified = check_decisions(scene)
    check_folds(scene)
    _check_record(scene)


def _check_record(scene: Scene) -> None:
    """Every event is recorded once, the audit finds nothing, and the read models are those of the rows."""
    audit = scene.record.audit()
    if not audit.clean:
        raise Violation(f"the audit of the record: {'; '.join(audit.violations[:3])}")
    if audit.events != len(scene.checker.events) or audit.by_table["repeats"]:
        raise Violation(f"the record has {dict(audit.by_table)} of {len(scene.checker.events)} events")
    for place, copier in scene.hosted(Copier):
        if (difference := differing("", scene.record.models(), copier.models)) is not None:
            raise Violation(f"{place.name}: its read models are not those of its rows: {difference}")


def check_caches(scene: Scene) -> None:
    """Every projection of the caches is the union of the workers' own indexes, and every trie that of its holders. Errors:
    Violation, AssertionError."""
    for place, hosted in scene.hosted(router.Hosted):
        _check_holders(scene, place.name, hosted.state.holders)
    for place, manager in scene.hosted(cachemgr.Hosted):
        _check_holders(scene, place.name, manager.state.holders)
        manager.state.trie.check(manager.state.holders)


def _check_gauges(place: Place, *names: str) -> None:
    """What operators see of it is 0."""
    assert place.process is not None, "a hosted service has a process"
    for name in names:
        if value := place.process.metrics.get_sample_value(name):
            raise Violation(f"{place.name}: {name} is {value:g} at rest")


def check_probes(probes: list[Client]) -> None:
    """What is asked once everything has healed is served. Errors: Violation."""
    if unserved := [f"{each.name}: {each.outcome} {each.reason}" for each in probes if each.outcome != "served"]:
        raise Violation(f"after everything had healed: {unserved}")


def _check_clients(scene: Scene) -> None:
    """What the log says of each request is what its client saw."""
    ends: dict[str, str] = {}
    lost: set[str] = set()
    for stored in scene.checker.events:
        data = stored.data
        if isinstance(data, RouterLost):
            lost.add(data.source)
        elif isinstance(data, ENDS):
            ends.setdefault(data.request, data.TYPE)
    for each in scene.clients:
        end = ends.get(each.request, UNRECORDED)
        if each.source in lost or (scene.has_died(each.source) and each.request not in ends):
            continue
        if end not in ENDS_OF[each.outcome]:
            raise Violation(f"{each.request}: its client was {each.outcome} ({each.reason}), the log says {end}")


def _check_holders(scene: Scene, name: str, holders: Holders) -> None:
    """The projection is the union of the workers' own indexes, each believed exactly; no report has ever contradicted it."""
    if holders.drifted_blocks:
        raise Violation(f"{name}: what was known of {holders.drifted_blocks} blocks was wrong")
    for place, agent in scene.hosted(NodeAgent):
        assert place.service is not None, "a hosted agent has a service"
        state, engine = agent.projection.state, place.service.engines[-1]
        for worker, group in state.served.workers(state.node).items():
            real = {block for _, run in engine.resident(group).runs for block in run}
            known, trust = {block for block, _ in holders.index.held(worker)}, holders.trust(worker)
            if trust != "exact" or known != real:
                raise Violation(f"{name}: knows {len(known)} blocks of {worker} ({trust}), which holds {len(real)}")
