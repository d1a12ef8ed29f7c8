"""Coefficients that were fitted anew come out again, and so does every placement that was priced by them."""

from itertools import product

from replay.findings import RECORDED_INPUTS
from services.controller import decider as controller
from shared.contracts.envelope import Stored
from shared.contracts.events import CalibrationUpdated, PrefillCompleted, RequestAssigned
from shared.contracts.ids import NodeId, RequestId, worker_id
from shared.model.cost import Coefficients
from tests.replay.lagging_world import COST, World
from tests.replay.test_verifying import verified

TRUE = COST.scaled(2)


def refitted() -> World:
    world = World(3, policy="vertumnus")
    world.commit(
        world.controller,
        controller.change_parameters(world.controller.state, {"refit": True}, controller.Asker("ann", "")),
    )
    world.run(60)
    shapes = product(((1, 0), (2, 2), (4, 4)), (50, 200, 900, 4_000), (0, 100, 700, 3_000), range(2))
    for (degree, rank), R, P, _ in shapes:
        done = PrefillCompleted(
            request=RequestId("elsewhere"), attempt=1, worker=worker_id(NodeId("n0"), 1, rank), node_epoch=1,
            computed_tokens=R, cached_own_tokens=P, queue_us=0, prefill_us=TRUE.prefill_us(degree, R, P),
            predicted_us=COST.prefill_us(degree, R, P),
        )  # fmt: skip
        world.say("n0", done)
    world.fold(world.controller, len(world.log))
    world.commit(world.controller, controller.refit(world.controller.state))
    world.run(300)
    return world


def test_a_refit_and_what_it_prices_come_out_again() -> None:
    world = refitted()
    found = verified(world.log)
    assert found.differences == []
    assert found.checked["calibration-updated"] == 1
    priced_by = [each.data.coefficients_version for each in world.log if isinstance(each.data, RequestAssigned)]
    assert {each == COST.version for each in priced_by} == {True, False}
    assert found.checked[RECORDED_INPUTS] == len(priced_by)
    assert not found.skipped


def test_a_set_that_the_evidence_does_not_give_is_found() -> None:
    log = refitted().log
    [at] = [n for n, each in enumerate(log) if isinstance(each.data, CalibrationUpdated)]
    real = log[at]
    assert isinstance(real.data, CalibrationUpdated)
    changed = Coefficients.model_validate(real.data.coefficients).model_dump() | {"d": 0.5}
    for change in ({"coefficients": changed}, {"error_after": 0.0}, {"to_seq": 5}):
        forged = real.event.model_copy(update={"data": real.data.model_copy(update=change)})
        log[at] = Stored(real.log, real.stream_seq, forged)
        assert "calibration-updated" in {each.type for each in verified(log).differences}, change
