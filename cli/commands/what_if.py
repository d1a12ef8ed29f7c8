"""`vertumnus what-if`: a recorded stretch again, under other parameters, another policy or another pool."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands import trace as trace_command
from cli.commands.events import Json, run
from cli.commands.simulate import Gpus, Seed, Seeds, Sets
from cli.commands.verify import From, To

if TYPE_CHECKING:
    from simulation.policies.recorded import Recorded
    from simulation.policies.setup import Setup


def what_if(
    first: From = None,
    last: To = None,
    set_: Sets = [],  # noqa: B006 - typer copies it
    policy: Annotated[str | None, typer.Option(help="place by this instead, as in `vertumnus simulate`")] = None,
    node: Annotated[
        list[str],
        typer.Option("--node", metavar="[TIMESx]DEGREES", help="another pool: nodes and their degrees; repeat"),
    ] = [],  # noqa: B006
    gpus: Gpus = None,
    seeds: Seeds = 4,
    seed: Seed = 1,
    json: Json = False,
) -> None:
    """Send recorded arrivals through another decision, in virtual time, and through the recorded one for comparison.

    Three columns: what was recorded, what the simulator makes of the recorded policy (so its own error shows), and the
    alternative. Everything but the first is modelled, by the coefficients that the pool was run with. On standard error it
    says which parameters of --set the alternative's policies do not read.
    """
    from cli.events.printing import progress
    from cli.record.instants import span
    from cli.simulating import asking
    from cli.simulating.comparison import comparison_document, comparison_picture
    from cli.terminal import output
    from cli.whereabouts import database_url
    from simulation.policies.recorded import recorded_run
    from simulation.policies.studies import against_recorded

    with trace_command.refusals():
        if not (set_ or policy or node or gpus):
            raise ValueError("nothing is different: give --set, --policy, --node or --gpus")
        changes, asked = asking.parse_parameters(set_), span(first, last)
        url = database_url()
        with progress("events read") as told:
            found = run(lambda: recorded_run(url, asked, told))
        other = _alternative(found, changes, policy, node, gpus)
        for line in asking.unheeded_by(other, changes):
            typer.echo(line, err=True)
        compared = against_recorded(found, other, range(seed, seed + seeds))
    if json:
        trace_command.print_json(comparison_document(found, compared))
    else:
        output().print(comparison_picture(found, compared))


def _alternative(
    found: "Recorded", changes: dict[str, Any], policy: str | None, node: list[str], gpus: int | None
) -> "Setup":
    """Errors: ValueError."""
    from cli.simulating import asking
    from simulation.policies.studies import policy as policy_of

    setup = found.setup
    if node or gpus:
        own = [",".join(map(str, composition)) for composition in setup.compositions]
        setup = replace(setup, compositions=asking.parse_nodes(node or own, gpus))
    if policy:
        chosen = policy_of(policy)
        setup = replace(setup, parameters={**setup.parameters, **chosen.parameters}, rule=chosen.rule)
    return replace(setup, parameters={**setup.parameters, **changes})
