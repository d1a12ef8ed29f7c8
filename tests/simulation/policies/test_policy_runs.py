"""Small worlds that can be worked out by hand, and large ones that must leave nothing behind."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from services.controller.saga import Move
from shared.contracts.commands import Assign, SamplingSpec
from shared.contracts.ids import BlockId, NodeId, RequestId, RouterId
from shared.model.cost import Coefficients, load_coefficients
from simulation.policies.agenda import NS_PER_S
from simulation.policies.routers import Asked
from simulation.policies.run import Simulation, simulate
from simulation.policies.setup import Setup

SIMPLE = Coefficients(version="a second and a millisecond a token", d=1, a=0, b=0, c=0.001, alpha=0)
"""E_C(R, P) = 1 + R / (1000 C)."""

FCFS = {"worker_order": "fcfs"}
PAPER = {"worker_order": "fcfs", "placement_policy": "paper"}


def asked(at_s: float, prompt_tokens: int, first_block: int = 0, shared: int = 0) -> Asked:
    """Blocks of 100 tokens; the first `shared` of them are everybody's."""
    ids = [*range(shared), *range(first_block + shared, first_block + prompt_tokens // 100)]
    chain = tuple(BlockId(each.to_bytes(16)) for each in ids)
    return Asked(round(at_s * NS_PER_S), prompt_tokens, chain)


def exact(*composition: int, **changes: object) -> Setup:
    return Setup((composition,), SIMPLE, parameters=PAPER | changes, block_tokens=100, noise_sd=0)


def ttft_s(setup: Setup, requests: Sequence[Asked]) -> list[float]:
    """In order of arrival."""
    simulation = Simulation(setup)
    simulation.run(requests)
    simulation.check()
    rows = simulation.rows
    by_arrival = sorted(zip(rows.column("arrival_us"), rows.column("ttft_us"), strict=True))
    return [float(ttft_us) / 1e6 for _, ttft_us in by_arrival]


def test_three_requests_on_two_workers() -> None:
    first = asked(0, 1_000, first_block=1_000, shared=5)
    second = asked(0.5, 1_000, first_block=2_000)
    third = asked(1, 1_000, first_block=3_000, shared=5)
    # The first takes worker 0 until 2.0, the second worker 1 until 2.5. At 1.0 worker 0 has a second less to do than worker
    # 1 half a second later; when the third begins, at 2.0, half of it lies there, so it takes 1.5 s instead of 2.
    assert ttft_s(exact(1, 1), [first, second, third]) == [2.0, 2.0, 2.5]


def test_a_prefix_is_worth_a_short_queue() -> None:
    first = asked(0, 1_000, first_block=1_000, shared=10)
    # When it arrives, worker 0 holds the prompt but for its last token and worker 1 is as idle.
    second = asked(3, 1_001, first_block=2_000, shared=10)
    assert ttft_s(exact(1, 1), [first, second]) == [2.0, 1.001]


def test_degrees_are_chosen_by_price() -> None:
    # 4,000 tokens: 5 s at degree 1, 3 s at degree 2, J = 15 against 9.1. Then 100 tokens: q = 2.9 there, 0 beside.
    assert ttft_s(exact(2, 1, 1), [asked(0, 4_000, 1_000), asked(0.1, 100, 2_000)]) == [3.0, 1.1]


def test_least_work_ignores_what_is_cached() -> None:
    requests = [asked(0, 1_000, 1_000, shared=10), asked(2.1, 100, 2_000), asked(2.7, 1_000, 3_000, shared=10)]
    # The paper's rule waits half a second for worker 0, where it computes one block; least work takes the idle worker.
    assert ttft_s(exact(1, 1), requests) == [2.0, 1.1, 1.6]
    assert ttft_s(exact(1, 1, placement_policy="least-work"), requests) == [2.0, 1.1, 2.0]


def test_shortest_first_lets_the_short_one_pass() -> None:
    requests = [asked(0, 1_000, 1_000), asked(0.1, 3_000, 2_000), asked(0.2, 100, 3_000)]
    assert ttft_s(exact(1), requests) == [2.0, 5.9, 6.9]
    # The long one would keep the short one 3 s longer, to save itself the second that a step costs.
    assert ttft_s(exact(1, worker_order="shortest-first"), requests) == [2.0, 7.0, 2.9]


def test_a_slow_worker_and_overheads_show() -> None:
    setup = Setup(((1,),), SIMPLE, parameters=PAPER, block_tokens=100, noise_sd=0, stragglers={NodeId("n0"): 2.0},
                  dispatch_s=0.25, handoff_s=0.5)  # fmt: skip
    assert ttft_s(setup, [asked(0, 1_000)]) == [0.25 + 4.0 + 0.5]


def traffic(count: int, rate: float, seed: int = 1) -> list[Asked]:
    chance, at_s, requests = Random(seed), 0.0, []
    for number in range(count):
        at_s += chance.expovariate(rate)
        tokens = min(30_000, max(1, round(chance.lognormvariate(8.5, 1.2))))
        requests.append(asked(at_s, tokens, 10_000 * number, shared=min(tokens // 100, chance.choice((0, 10, 40)))))
    return requests


def pool(**fields: object) -> Setup:
    coefficients = load_coefficients("qwen3_30b_a3b_h20")
    return Setup(((4, 4), (2, 2, 4), (8,)), coefficients, block_tokens=100, **fields)  # type: ignore[arg-type]


def test_a_prefix_is_read_from_another_worker_if_that_is_cheaper() -> None:
    # By a bandwidth that is measured on the first read, ten shared blocks take next to nothing. When the third comes, the
    # worker that has them is busy for another 2.5 s: the other one reads them, and computes 4,000 tokens instead of 5,000.
    setup = Setup(((1,), (1,)), SIMPLE, parameters={"placement_policy": "vertumnus", **FCFS, "prefix_fetch": True},
                  block_tokens=100, noise_sd=0, kv_bytes_per_token=1)  # fmt: skip
    requests = [
        asked(0, 1_000, 1_000, shared=10),
        asked(2.5, 2_000, 2_000, shared=10),
        asked(2.6, 5_000, 3_000, shared=10),
    ]
    first, second, third = ttft_s(setup, requests)
    assert (first, second) == (2.0, 2.0)
    assert 5.0 < third < 5.1
    assert ttft_s(replace(setup, parameters={**setup.parameters, "prefix_fetch": False}), requests)[2] == 6.0


def test_a_fetch_that_waits_for_another_worker_s_begins_when_that_is_over() -> None:
    setup = Setup(((1,), (1, 1, 1)), SIMPLE, block_tokens=100, noise_sd=0, kv_bytes_per_token=1)
    simulation = Simulation(setup)
    prompts = [asked(0, 1_000, first_block) for first_block in (1_000, 2_000, 3_000)]
    simulation.run([asked(0, 100)])
    lender, node = simulation.nodes[NodeId("n0")], simulation.nodes[NodeId("n1")]
    [source], [group] = lender.steps.groups, lender.steps.groups.values()
    for number, prompt in enumerate(prompts):
        lender.steps.pool.copies.install(f"{number}", group, None, prompt.chain)
        lender.steps.pool.copies.finish(f"{number}", 10)
    done: list[str] = []
    node.steps.effects = node.steps.effects._replace(prefilled=lambda job, _: done.append(job.assign.request))
    first, _, third = node.steps.groups
    for number, (prompt, worker) in enumerate(zip(prompts, (first, first, third), strict=True)):
        refused = node.assign(
            Assign(
                request=RequestId(f"r{number}"), attempt=1, router=RouterId("r"), router_source="r-0", worker=worker,
                prompt_tokens=1_000, block_ids=b"".join(prompt.chain), max_new_tokens=1, sampling=SamplingSpec(),
                service_us=1_000_000, fetch_from=source, fetch_blocks=10,
            )
        )  # fmt: skip
        assert refused is None
    while simulation.agenda.now_ns < 60 * NS_PER_S:
        simulation.agenda.step()
    assert sorted(done) == ["r0", "r1", "r2"]


def test_equal_seeds_give_equal_runs() -> None:
    requests = traffic(200, 20)
    first, again = (simulate(pool(seed=3), requests) for _ in range(2))
    assert first == again
    assert simulate(pool(seed=4), requests) != first


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"parameters": PAPER},
        {"parameters": {"placement_policy": "vertumnus"}, "blocks_per_rank": 400},
        {"routers": 3, "view_age_s": 1.0},
        {"blocks_per_rank": 400},
    ],
)
def test_nothing_is_left_behind(fields: dict[str, object]) -> None:
    simulation = Simulation(pool(**fields))
    figures = simulation.run(traffic(200, 40))
    simulation.check()
    assert figures.ttft.requests == 200
    assert figures.unserved == 0
    assert 0 < figures.hit_rate < 1


def test_queued_requests_move_to_idle_workers() -> None:
    def redirects(stealing: bool) -> int:
        parameters = {"placement_policy": "vertumnus", "stealing": stealing}
        simulation = Simulation(pool(parameters=parameters, noise_sd=0.3))
        figures = simulation.run(traffic(120, 30))
        simulation.check()
        assert (figures.ttft.requests, figures.unserved) == (120, 0)
        return figures.redirects

    assert redirects(stealing=True) > 0 == redirects(stealing=False)


def test_a_request_that_fits_nowhere_is_counted() -> None:
    small = pool(blocks_per_rank=10)
    figures = simulate(small, [asked(0, 500), asked(1, 50_000)])
    assert (figures.ttft.requests, figures.unserved) == (1, 1)


def test_nodes_change_under_load_and_nobody_is_lost() -> None:
    simulation = Simulation(pool(cache_manager=True))
    moves = [Move(NodeId("n0"), (8,), "operator", "test"), Move(NodeId("n2"), (1, 1, 2, 4), "operator", "test")]
    for at_s, move in enumerate(moves, 1):
        simulation.agenda.after(at_s, partial(simulation.control.move, move))
    figures = simulation.run(traffic(250, 40))
    simulation.check()
    assert figures.reconfigurations == 2
    assert figures.ttft.requests == 250
    assert {node.composition for node in simulation.control.state.pool.nodes.values()} == {
        (8,),
        (2, 2, 4),
        (1, 1, 2, 4),
    }


def test_requests_come_in_order() -> None:
    with pytest.raises(ValueError, match="before the one ahead"):
        simulate(pool(), [asked(2, 100), asked(1, 100)])


def test_a_column_holds_no_other() -> None:
    simulation = Simulation(exact(1))
    simulation.run([asked(0, 1_000, first_block=1_000), asked(9, 500, first_block=2_000)])
    column = simulation.rows.column("prompt_tokens")
    assert (column.tolist(), column.base) == ([1_000, 500], None)
