"""A forecast from window to plan, by the real shell over the log in memory; and what `verify` makes of it."""

import asyncio
import random

import pytest
from controller_pool import N0, Pool
from test_driving import ME, pool_of

from replay import roles
from services.controller import decider, forecast, forecasting
from services.controller.forecast import Question, Scores
from shared.contracts.events import ForecastMade, ReconfigurationPlanned, WindowClosed
from shared.contracts.ids import WorkerId
from tests.replay.test_verifying import verified
from tests.support.story import assigned, completed, received

W = WorkerId("n0/1/0")


class Stuck:
    """A scorer whose answers take their time."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: asyncio.Future[Scores | None] = asyncio.get_running_loop().create_future()

    async def scores(self, _: Question) -> Scores | None:
        self.asked += 1
        return await self.answer


async def busy(pool: Pool, seconds: int, per_s: int = 2) -> None:
    """Short prompts that a worker of a high degree is done with sooner, and no more of them than it can take."""
    chance = random.Random(seconds)
    for second in range(seconds):
        for number in range(per_s):
            name, tokens = f"r{pool.clock.now_ns()}-{number}", chance.randint(1_000, 2_000)
            pool.agent.record([received(name, tokens), assigned(name, W, tokens, service_us=1_000)])
            pool.agent.record([completed(name, W, 900_000 + second)])
        await pool.live(1)


async def forecasting_pool(composition: tuple[int, ...] = (1, 1, 1, 1, 1, 1, 1, 1), **changes) -> Pool:
    pool = await pool_of(composition)
    parameters = {"reconfiguration_policy": "forecast", **changes}
    await pool.leadership.decide(lambda: decider.change_parameters(pool.controller.state, parameters, ME))
    return pool


async def test_a_forecast_moves_a_node_and_says_what_it_promised_and_what_came_of_it() -> None:
    pool = await forecasting_pool()
    await busy(pool, 82)
    made, *later = pool.all(ForecastMade)
    assert made.window == 2, "half a minute of arrivals is the least"
    assert made.pools[0] == {1: 8}
    assert len(made.pools) == len(made.scores_ppm) == len(made.moves) == 10, "the mixes of one node of eight ranks"
    [plan, *_] = pool.all(ReconfigurationPlanned)
    best = min(range(10), key=lambda n: made.scores_ppm[n] * (1 + 0.01 * made.moves[n]))
    assert dict.fromkeys(plan.new_composition) == dict.fromkeys(sorted(made.pools[best], reverse=True))
    assert plan.policy == "forecast"
    assert plan.forecast_gain == pytest.approx(1 - made.scores_ppm[best] / made.scores_ppm[0])
    assert [each.realised_gain is None for each in (made, *later)][:3] == [True, True, False]
    found = verified(pool.log_of, deep=True)
    assert found.differences == []
    assert found.checked["forecast-made"] >= 3
    assert found.checked["reconfiguration-planned"] == len(pool.all(ReconfigurationPlanned))


async def test_a_question_waits_for_no_other() -> None:
    pool = await forecasting_pool()
    scorer = Stuck()
    pool.controller._forecasts = pool.controller._forecasts._replace(scorer=scorer)
    await busy(pool, 82)
    assert len(pool.all(WindowClosed)) >= 4
    assert scorer.asked == 1, "what comes behind it would be too old when answered"
    scorer.answer.set_result(None)
    await busy(pool, 22)
    assert scorer.asked >= 2


async def test_too_few_arrivals_are_no_ground_for_a_forecast() -> None:
    pool = await forecasting_pool()
    await busy(pool, 19, per_s=1)
    await pool.live(23)
    assert len(pool.all(WindowClosed)) == 2
    assert not pool.all(ForecastMade)


async def test_an_answer_that_comes_after_a_change_is_dropped() -> None:
    pool = await forecasting_pool()
    await busy(pool, 38)
    state = pool.controller.state
    while len(pool.all(WindowClosed)) < 2:
        await pool.clock.advance(0.25)
    await pool.leadership.decide(lambda: decider.pin(state, N0, ME))
    await pool.live(2)
    assert not pool.all(ForecastMade)


async def test_advice_of_a_forecast_is_recorded_and_nothing_done() -> None:
    pool = await forecasting_pool(reconfiguration_advisory=True)
    await busy(pool, 62)
    assert len(pool.all(ForecastMade)) == 2
    assert not pool.all(ReconfigurationPlanned)
    assert verified(pool.log_of).differences == []


async def test_a_forged_score_is_found_by_replaying_it() -> None:
    pool = await forecasting_pool(composition=(8,), forecast_gain=0.9)
    await busy(pool, 42)
    log = list(pool.log_of)
    [at] = [n for n, each in enumerate(log) if isinstance(each.data, ForecastMade)]
    data = log[at].data
    forged = data.model_copy(update={"scores_ppm": (data.scores_ppm[0] + 1, *data.scores_ppm[1:])})
    log[at] = log[at]._replace(event=log[at].event.model_copy(update={"data": forged}))
    assert verified(log).differences == [], "as it was answered"
    meanwhile = [received(f"m{number}", 1_000) for number in range(20)]
    late = [
        log[0]._replace(event=log[0].event.model_copy(update={"data": each, "type": each.TYPE})) for each in meanwhile
    ]
    log[at:at] = late
    log = [each._replace(stream_seq=seq) for seq, each in enumerate(log, start=1)]
    roles._scores.cache_clear()
    [difference] = verified(log, deep=True).differences
    assert (difference.type, difference.field) == ("forecast-made", "scores_ppm[0]")
    asked = roles._scores.cache_info()
    assert (asked.misses, asked.hits >= len(late)) == (1, True), "every state since the window asks the same question"


@pytest.mark.parametrize("fault", ["stationary", "targets", "choose"])
async def test_a_forecast_by_another_rule_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = await forecasting_pool()
    real = getattr(forecast, fault)
    wrong = {
        "stationary": lambda arrivals, now_ns: real(arrivals, now_ns)[1:],
        "targets": lambda nodes: real(nodes)[:-1],
        "choose": lambda *of: real(*of)._replace(gain=0.5),
    }
    with monkeypatch.context() as planted:
        planted.setattr(forecasting.forecast, fault, wrong[fault])
        await busy(pool, 42)
        assert pool.all(ForecastMade)
    assert verified(pool.log_of).differences
