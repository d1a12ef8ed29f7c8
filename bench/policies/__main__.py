"""Tables and pictures of policies in virtual time. Seconds of requests are the cost model's."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bench.policies import adapting as adapting_bench
from bench.policies import caching as caching_bench
from bench.policies import refitting as refitting_bench
from bench.policies import replays as replays_bench
from bench.policies import replicas as replicas_bench
from bench.policies import routing as routing_bench
from bench.policies import scale as scale_bench
from bench.policies import sensitivity as sensitivity_bench
from bench.policies import tenants as tenants_bench
from bench.policies.comparing import Lengths, loads_of
from bench.policies.sensitivity import VARIED
from bench.policies.workloads import DRIFTING
from cli.simulating.asking import parse_nodes
from shared.model.cost import load_coefficients
from simulation.policies.setup import Setup
from simulation.policies.studies import policy as policy_of

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

TRACES = (
    "trace files in Mooncake's format, or made-up workloads by name; rates of its own follow one after an @: day@5,8"
)
Traces = Annotated[list[str], typer.Argument(help=TRACES)]
Policy = Annotated[str, typer.Option(help="as in `vertumnus simulate`")]
Slices = Annotated[int, typer.Option(min=1, help="stretches of each trace, each a run; the spread is over them")]
Limit = Annotated[int, typer.Option(min=1, help="requests of a slice at most")]
WarmUp = Annotated[float, typer.Option(min=0, help="what arrives before is left out")]
Rates = Annotated[list[float], typer.Option(help="requests/s")]
Jobs = Annotated[int, typer.Option(min=1, help="processes")]
Kept = Annotated[
    Path, typer.Option(file_okay=False, help="where runs are kept as they end: a table goes on from there")
]
KEPT = Path("build/cells")
Out = Annotated[Path | None, typer.Option(file_okay=False, help="a folder for JSON, PNG and SVG")]
AGES_S, MANY = [0.001, 0.05, 1.0], [4, 8]
RATES, SIZES = [3.0, 5.0, 8.0], [40, 400, 2_000, 10_000]
BETAS, LAMBDAS = [1.0, 2.0, 3.0, 5.0, 8.0], [0.05, 0.1]
STEADY = [name for name in VARIED if name != "windows"]
PEERS = [
    "vertumnus",
    "round-robin",
    "least-work",
    "sglang-cache-aware",
    "dynamo-kv",
    "llm-d",
    "preble-e2",
    "length-buckets",
]
SETUP = Setup(parse_nodes(["2x4,4", "3x8"], None), load_coefficients("qwen3_30b_a3b_h20"))


@app.command()
def routing(traces: Traces, policy: Annotated[list[str], typer.Option()] = PEERS, rate: Rates = RATES,
            beta: Annotated[list[float], typer.Option(help="of `paper`, each with each λ")] = BETAS,
            lam: Annotated[list[float], typer.Option(help="of `paper`")] = LAMBDAS,
            slices: Slices = 8, limit: Limit = 1_500, warmup_s: WarmUp = 30,
            jobs: Jobs = 1, kept: Kept = KEPT, out: Out = None) -> None:  # fmt: skip
    """Placement policies over load, against the paper's with its parameters tuned per load (the paper's Figures 7 to 12)."""
    loads = [each for trace in traces for each in loads_of(trace, rate)]
    policies, lengths = [policy_of(name) for name in policy], Lengths(slices, limit, warmup_s)
    routing_bench.routing(loads, policies, beta, lam, SETUP, lengths, jobs, kept, out)


@app.command()
def sensitivity(traces: Traces, policy: Policy = "paper", rate: Rates = [8.0],  # noqa: B006  (never changed)
                vary: Annotated[list[str], typer.Option(help=", ".join(VARIED))] = STEADY,
                slices: Slices = 4, limit: Limit = 1_500, warmup_s: WarmUp = 30,
                jobs: Jobs = 1, kept: Kept = KEPT, out: Out = None) -> None:  # fmt: skip
    """One policy with other parameters, wrong predictions, more noise. Windows want a load that changes: phased@15."""
    loads, lengths = [each for trace in traces for each in loads_of(trace, rate)], Lengths(slices, limit, warmup_s)
    sensitivity_bench.sensitivity(loads, policy_of(policy), vary, SETUP, lengths, jobs, kept, out)


@app.command()
def replicas(traces: Traces, policy: Policy = "vertumnus", rate: Rates = [8.0],  # noqa: B006  (never changed)
             routers: Annotated[list[int], typer.Option()] = MANY,
             age_s: Annotated[list[float], typer.Option(help="of what a router knows of others")] = AGES_S,
             slices: Slices = 8, limit: Limit = 1_500, warmup_s: WarmUp = 30,
             jobs: Jobs = 1, kept: Kept = KEPT) -> None:  # fmt: skip
    """Several routers against one, by age of their views, with and without stealing."""
    loads = [each for trace in traces for each in loads_of(trace, rate)]
    lengths = Lengths(slices, limit, warmup_s)
    replicas_bench.replicas(loads, policy_of(policy), routers, age_s, SETUP, lengths, jobs, kept)


@app.command()
def refit(traces: Traces, policy: Policy = "vertumnus", rate: Rates = [8.0],  # noqa: B006  (never changed)
          slices: Slices = 4, limit: Limit = 1_500, warmup_s: WarmUp = 60,
          jobs: Jobs = 1, kept: Kept = KEPT) -> None:  # fmt: skip
    """Wrong coefficients, priced by each worker's ratio, by a refit, by both and by neither."""
    loads = [each for trace in traces for each in loads_of(trace, rate)]
    refitting_bench.refitting(loads, policy_of(policy), SETUP, Lengths(slices, limit, warmup_s), jobs, kept)


@app.command()
def scale(policy: Policy = "paper", gpus: Annotated[list[int], typer.Option()] = SIZES,
          requests: int = 3_000, out: Out = None) -> None:  # fmt: skip
    """Decision cost, event rate and memory from 40 to 10,000 GPUs."""
    scale_bench.scale(gpus, policy, SETUP, requests, out)


@app.command()
def caching(traces: Annotated[list[str] | None, typer.Argument(help=f"{TRACES}. None: prefixes that drift")] = None,
            policy: Annotated[list[str], typer.Option()] = ["vertumnus"],  # noqa: B006  (never changed)
            rate: Rates = [27.0, 30.0, 33.0], beta: Annotated[float, typer.Option(help="of the paper's price")] = 3.0,  # noqa: B006
            fetch: Annotated[bool, typer.Option(help="whether `vertumnus` reads prefixes from other workers")] = True,
            slices: Slices = 8, limit: Limit = 6_600, warmup_s: WarmUp = 60,
            jobs: Jobs = 1, kept: Kept = KEPT, out: Out = None) -> None:  # fmt: skip
    """The cache manager on and off (the paper's Figure 14), on 6 workers of degree 4 and 2 of degree 8."""
    nodes = parse_nodes(["3x4,4", "2x8"], None)
    setup = replace(SETUP, compositions=nodes, parameters={"beta": beta, "prefix_fetch": fetch})
    loads = [each for trace in traces or [DRIFTING] for each in loads_of(trace, rate)]
    policies = [policy_of(name) for name in policy]
    caching_bench.caching(loads, policies, setup, Lengths(slices, limit, warmup_s), jobs, kept, out)


@app.command()
def adapting(policy: Annotated[list[str], typer.Option(help="placements")] = ["vertumnus", "paper"],  # noqa: B006
             load: Annotated[str, typer.Option(help="phased, day")] = "phased",
             seeds: Annotated[int, typer.Option(min=1)] = 6,
             shrink: Annotated[float, typer.Option(min=0.4, max=1, help="of the length of each phase, or of the day")] = 1.0,
             every: Annotated[bool, typer.Option("--every", help="all 21 compositions, not only those in contention")] = False,
             jobs: Jobs = 1, kept: Kept = KEPT, out: Out = None) -> None:  # fmt: skip
    """Fixed compositions and policies that change them, under phases or over a day (the paper's Figure 13)."""
    policies = [policy_of(name) for name in policy]
    adapting_bench.adapting(policies, SETUP, load, seeds, shrink, every, jobs, kept, out)


@app.command()
def replays(policy: Annotated[list[str], typer.Option(help="placements")] = ["vertumnus", "paper"],  # noqa: B006
            seed: int = 0, jobs: Jobs = 1) -> None:  # fmt: skip
    """How replays of recent arrivals compare pools, beside how they compare in the simulator, by rate of the replay."""
    replays_bench.replays([policy_of(name) for name in policy], SETUP, seed, jobs)


@app.command()
def tenants(policy: Annotated[list[str], typer.Option()] = ["paper", "vertumnus"],  # noqa: B006  (never changed)
            other: Annotated[float, typer.Option(help="requests/s of the other tenant")] = 2,
            before: Annotated[float, typer.Option(help="requests/s of the flooding one")] = 6,
            during: Annotated[float, typer.Option(help="… in its flood")] = 30,
            seconds: float = 120, seeds: Annotated[int, typer.Option(min=1)] = 4, out: Out = None) -> None:  # fmt: skip
    """What one tenant's flood does to another tenant, with and without shares of the workers."""
    policies = [policy_of(name) for name in policy]
    tenants_bench.tenants(policies, SETUP, (other, before, during), seconds, seeds, out)


@app.command()
def speed(policy: Policy = "paper", hours: float = 24) -> None:
    """A day at 6 requests/s on 40 GPUs: how long it takes, and whether memory grows."""
    scale_bench.day(policy, SETUP, hours)


if __name__ == "__main__":
    app()
