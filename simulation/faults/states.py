"""What must hold of every living process between any two instants: by the states' own checks."""

from services.cachemgr import hosting as cachemgr
from services.controller import hosting as controller
from services.router import hosting as router
from services.worker.agent import NodeAgent
from simulation.faults.record import Copier
from simulation.faults.scene import Scene


def check_states(scene: Scene) -> None:
    """Every state agrees with itself, and no two processes lead with one term. Errors: AssertionError."""
    for _, hosted in scene.hosted(router.Hosted):
        state = hosted.state
        state.loads.check()
        state.holders.check()
        state.board.check(state.pool, state.loads, state.calibration)
        state.usage.check(state.loads)
    for _, manager in scene.hosted(cachemgr.Hosted):
        manager.state.holders.check()
        manager.state.trie.check(manager.state.holders)
    for place, agent in scene.hosted(NodeAgent):
        agent.projection.state.desk.check()
        assert place.service is not None, "a hosted agent has a service"
        for engine in place.service.engines[-1:]:
            engine.check()
    for _, copier in scene.hosted(Copier):
        if copier.models is not None:
            copier.models.check()
    _check_leaders([hosted.leadership.term for _, hosted in scene.hosted(controller.Hosted)])
    _check_leaders([hosted.leadership.term for _, hosted in scene.hosted(cachemgr.Hosted)])


def _check_leaders(terms: list[int | None]) -> None:
    leading = [term for term in terms if term is not None]
    assert len(leading) == len(set(leading)), f"two processes lead with one term: {leading}"
