"""`python -m simulation.faults.sagas`: one reconfiguration under load, with one fault at each of its steps, over and over.

A seed is a pool of two nodes, requests that come all the time, and one node that an operator sends to another composition. It
runs undisturbed first, which says who leads and when each step begins; then again with each fault, at a moment of the step that
the seed draws. So what is disturbed is a real agent with its queue, and clients wait for what it has. Everything that must hold
of any run is checked (`quiet.py`): one end for the plan, every worker schedulable, every answer right, the record whole.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Annotated, NamedTuple

import typer

from shared.contracts.envelope import Stored
from shared.contracts.events import (
    DrainCompleted,
    DrainStarted,
    EpochAborted,
    EpochCommitted,
    LeadershipTaken,
    RankAdoptedEpoch,
    ReconfigurationPlanned,
)
from simulation.faults.process import BEGINNING_NS
from simulation.faults.running import Verdict, judge
from simulation.faults.scenario import COMPOSITIONS, Ask, Fault, FaultKind, Request, Scenario, Shape

SHAPE = Shape(
    routers=2,
    standbys=True,
    compositions=((4, 4), (4, 4)),
    decode_ranks=1,
    blocks_per_rank=40,
    queue_max=8,
    skews_ms=0,
)

ASKED_S = 4.0
STEPS = (ReconfigurationPlanned, DrainStarted, DrainCompleted, RankAdoptedEpoch, EpochCommitted)
"""What begins a step, and what ends the last."""

NAMES = ("planned", "draining", "switching", "reconciling", "committed")
AFTER_S = 0.5
"""How long after the commit a fault of the step `committed` may come."""

CACHE_MANAGERS = ("cachemgr-a", "cachemgr-b")


class Calm(NamedTuple):
    """The undisturbed run: the controller's role that led, and when each step began; `begins_s` has the end as well."""

    leader: str
    begins_s: tuple[float, ...]


class Ran(NamedTuple):
    """How the plan ended, and how the run."""

    end: str
    verdict: Verdict


Faults = Callable[[Random, Calm], tuple[Fault, ...]]


def scenario(seed: int) -> Scenario:
    """Twelve requests around one reconfiguration of the first node."""
    chance = Random(f"saga {seed}")
    fitting = [each for each in COMPOSITIONS if sum(each) == sum(SHAPE.compositions[0])]
    others = [at for at, each in enumerate(fitting) if each != SHAPE.compositions[0]]
    times = sorted(round(ASKED_S + chance.uniform(-1, 2), 3) for _ in range(12))
    return Scenario(
        seed=seed,
        shape=SHAPE,
        requests=tuple(_request(chance, at_s) for at_s in times),
        asks=(Ask(ASKED_S, "reconfigure", 0, (chance.choice(others) + 0.5) / len(fitting)),),
        faults=(),
    )


def _request(chance: Random, at_s: float) -> Request:
    documents = tuple(chance.randint(0, 2) for _ in range(chance.randint(0, 3)))
    return Request(at_s, documents, chance.randint(1, 90), max_tokens=chance.choice((1, 8, 20)), router=chance.random())


def calm(seed: int) -> Calm:
    """The run without a fault. AssertionError if its plan was not committed."""
    events, verdict = _run(scenario(seed))
    assert verdict.clean, verdict.violations
    assert _end(events) == "committed", f"seed {seed}: {_end(events)} without a fault"
    taken = next(each for each in events if isinstance(each.data, LeadershipTaken))
    planned = next(at for at, each in enumerate(events) if isinstance(each.data, ReconfigurationPlanned))
    begins_s = [
        next((each.event.time_ns - BEGINNING_NS) / 1e9 for each in events[planned:] if isinstance(each.data, kind))
        for kind in STEPS
    ]
    leader = "-".join(taken.event.source.split("-")[:2])
    return Calm(leader, (*begins_s, begins_s[-1] + AFTER_S))


def _within(step: str, chance: Random, calm: Calm) -> float:
    """A moment of the step."""
    at = NAMES.index(step)
    return chance.uniform(*calm.begins_s[at : at + 2])


def _once(kind: FaultKind, of: str, step: str, chance: Random, calm: Calm) -> tuple[Fault, ...]:
    """One fault in a step, of half a second to eight; `leader` stands for whoever leads."""
    at_s, lasts_s = _within(step, chance, calm), chance.uniform(0.5, 8)
    return (Fault(at_s, kind, calm.leader if of == "leader" else of, lasts_s),)


def _silent(chance: Random, calm: Calm) -> tuple[Fault, ...]:
    """Nobody hears of either cache manager from the plan on."""
    at_s = _within("planned", chance, calm)
    return tuple(Fault(at_s, "cut", each, 8.0) for each in CACHE_MANAGERS)


FAULTS: Mapping[str, Faults] = {
    "none": lambda *_: (),
    **{f"the leading controller dies, {step}": partial(_once, "kill", "leader", step) for step in NAMES},
    **{
        f"the leading controller is cut off and comes back, {step}": partial(_once, "cut", "leader", step)
        for step in NAMES[:-1]
    },
    **{f"a rank dies, {step}": partial(_once, "engine-death", "worker-n0", step) for step in NAMES[1:]},
    **{f"the agent dies, {step}": partial(_once, "kill", "worker-n0", step) for step in NAMES[1:]},
    **{f"NATS is away, {step}": partial(_once, "outage", "", step) for step in NAMES[:-1]},
    "both cache managers are cut off for 8 s": _silent,
}


def disturbed(fault: str, seed: int, found: Calm) -> Ran:
    """The same run with the fault."""
    asked = scenario(seed)
    faults = FAULTS[fault](Random(f"{fault} {seed}"), found)
    events, verdict = _run(replace(asked, faults=faults))
    return Ran(_end(events), verdict)


def _run(asked: Scenario) -> tuple[Sequence[Stored], Verdict]:
    """The log with the verdict; nothing of the log if the run ended before it came to rest."""
    events: list[Stored] = []

    def listen(log: Sequence[Stored]) -> None:
        events.extend(log)

    return events, judge(asked, listen)


def _end(events: Sequence[Stored]) -> str:
    """How the plan ended."""
    plans = {each.data.epoch for each in events if isinstance(each.data, ReconfigurationPlanned)}
    ends = [
        f"aborted, {data.step}: {data.reason}" if isinstance(data, EpochAborted) else "committed"
        for data in (each.data for each in events)
        if isinstance(data, EpochAborted | EpochCommitted) and data.epoch in plans and data.node == SHAPE.nodes[0]
    ]
    return ", ".join(ends) or "nobody planned it"


def main(times: Annotated[int, typer.Option(min=1, help="how often each fault is injected")] = 20) -> None:
    """Inject every fault, and print how plans and requests ended. The code is 1 if something that must hold did not."""
    found = [calm(seed) for seed in range(times)]
    failed = 0
    typer.echo("| fault, step | plans | requests |\n| --- | --- | --- |")
    for fault in FAULTS:
        ran = [disturbed(fault, seed, each) for seed, each in enumerate(found)]
        typer.echo(f"| {fault} | {_counted(each.end for each in ran)} | {_counted(_outcomes(ran))} |")
        for seed, each in enumerate(ran):
            failed += not each.verdict.clean
            for rule in each.verdict.violations:
                typer.echo(f"violated by {fault}, seed {seed}: {rule}")
    raise typer.Exit(code=1 if failed else 0)


def _outcomes(ran: Sequence[Ran]) -> Iterator[str]:
    for each in ran:
        yield from each.verdict.outcomes.elements()


def _counted(names: Iterator[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())


if __name__ == "__main__":
    typer.run(main)
