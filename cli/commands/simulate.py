"""`vertumnus simulate`: a trace through a pool that is not there, by the code that decides in one that is."""

from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands import trace as trace_command
from cli.commands.trace import (
    SECONDS_MAX,
    BlockTokens,
    EndS,
    JitterMs,
    Json,
    Limit,
    PhaseTexts,
    Rate,
    Speed,
    StartS,
    Workload,
)

if TYPE_CHECKING:
    from simulation.policies.routers import Asked
    from simulation.policies.setup import Setup
    from simulation.policies.studies import Run

DEFAULT_NODES = ["2x4,4", "3x8"]
DEFAULT_PHASES = ["600:5:conversation"]

Nodes = Annotated[
    list[str], typer.Option("--node", metavar="[TIMESx]DEGREES", help="nodes and their workers' degrees; repeat")
]
Gpus = Annotated[int | None, typer.Option(min=1, help="repeat the nodes until there are so many GPUs")]
Policies = Annotated[list[str], typer.Option("--policy", help="a placement policy or a baseline; repeat to compare")]
Sets = Annotated[list[str], typer.Option("--set", metavar="NAME=VALUE", help="a parameter, for every policy; repeat")]
Seeds = Annotated[int, typer.Option(min=1, max=1_000, help="runs of each policy, with other noise and arrivals")]
Seed = Annotated[int, typer.Option(min=0, help="the first seed; equal seeds give equal runs")]
Out = Annotated[Path | None, typer.Option("--out", "-o", file_okay=False, help="a folder for PNG, SVG and rows.csv")]
Coefficients = Annotated[str, typer.Option(help="the set that routers and agents predict by: a name, or a .json")]


def simulate(
    file: Annotated[
        Path | None, typer.Argument(exists=True, dir_okay=False, help="a trace; made up when left out")
    ] = None,
    policy: Policies = ["paper"],  # noqa: B006 - typer copies it
    node: Nodes = DEFAULT_NODES,
    gpus: Gpus = None,
    set_: Sets = [],  # noqa: B006
    phase: PhaseTexts = DEFAULT_PHASES,
    workload: Workload = None,
    start_s: StartS = 0,
    end_s: EndS = float("inf"),
    limit: Limit = None,
    speed: Speed = None,
    rate: Rate = None,
    jitter_ms: JitterMs = None,
    block_tokens: BlockTokens = 512,
    warmup_s: Annotated[
        float, typer.Option(min=0, max=SECONDS_MAX, help="leave out of the figures what arrives before")
    ] = 0,
    seeds: Seeds = 1,
    seed: Seed = 1,
    coefficients: Coefficients = "qwen3_30b_a3b_h20",
    noise: Annotated[float, typer.Option(min=0, max=1, help="standard deviation of a step's time, relative")] = 0.05,
    straggler: Annotated[list[str], typer.Option(metavar="NODE=FACTOR", help="a slow node, such as n0=2")] = [],  # noqa: B006
    blocks_per_rank: Annotated[int, typer.Option(min=1, help="KV blocks of each GPU")] = 1_395,
    routers: Annotated[int, typer.Option(min=1, max=64)] = 1,
    view_age_s: Annotated[float, typer.Option(min=0, max=3_600, help="how late routers learn what others did")] = 0,
    out: Out = None,
    json: Json = False,
) -> None:
    """Place a trace on a modelled pool, in virtual time, with the deciders of the real one; several policies side by side.

    Seconds are the cost model's. Prefill alone is simulated: decode ranks and hand-offs take no time. On standard error it
    says which parameters of --set none of the policies reads.
    """
    from cli.simulating import asking
    from cli.simulating.picture import runs_picture
    from cli.terminal import output
    from shared.model.cost import load_coefficients
    from simulation.policies.arrivals import requests_of
    from simulation.policies.setup import Setup
    from simulation.policies.studies import compared
    from simulation.policies.studies import policy as policy_of
    from simulation.workloads.files import read

    with trace_command.refusals():
        setup = Setup(
            compositions=asking.parse_nodes(node, gpus),
            coefficients=load_coefficients(coefficients),
            parameters=asking.parse_parameters(set_),
            block_tokens=block_tokens,
            blocks_per_rank=blocks_per_rank,
            noise_sd=noise,
            stragglers=asking.parse_stragglers(straggler),
            routers=routers,
            view_age_s=view_age_s,
        )

        made = trace_command.made_up(phase, workload)

        def asked(number: int) -> "Iterable[Asked]":
            options = trace_command.Shaping(start_s, end_s, limit, speed, rate, jitter_ms, 1, 1 << 22, 1 << 20, number)
            _, rows = options.apply(lambda: made(Random(number)) if file is None else read(file, block_tokens))
            return requests_of(rows, block_tokens)

        policies = [policy_of(name) for name in policy]
        ignored = [set(asking.unheeded_by(each.of(setup), setup.parameters)) for each in policies]
        for line in sorted(set.intersection(*ignored)):
            typer.echo(line, err=True)
        runs = compared(policies, setup, asked, range(seed, seed + seeds), warmup_s)
        if out is not None:
            _write(out, _title(setup, file), runs)
    if json:
        trace_command.print_json([_document(run) for run in runs])
        return
    output().print(runs_picture(_title(setup, file), runs))
    if out is not None:
        trace_command.errors.print(f"{out}: ttft.png, ttft.svg, rows.csv")


def _title(setup: "Setup", file: Path | None) -> str:
    return f"{file.name if file else 'made up'} on {setup.gpus} GPUs, modelled ({setup.coefficients.version})"


def _document(run: "Run") -> dict[str, Any]:
    return {"policy": run.policy, "seed": run.seed, **run.outcome._asdict()}


def _write(folder: Path, title: str, runs: "list[Run]") -> None:
    """Errors: OSError."""
    from cli.simulating.plotting import save, sides

    save(sides(runs, title), folder, "ttft")
    with (folder / "rows.csv").open("w") as file:
        names = runs[0].rows.COLUMNS
        file.write(",".join(("policy", "seed", *names)) + "\n")
        for run in runs:
            for row in zip(*(run.rows.column(name) for name in names), strict=True):
                file.write(",".join(map(str, (run.policy, run.seed, *row))) + "\n")
