"""`vertumnus params`: what the pool decides by, and changes of it, which are events."""

from typing import Annotated, Any

import typer

from cli.commands.operate import By, Reason, ask, request
from cli.parameters import parse_changes
from cli.terminal import output

Json = Annotated[bool, typer.Option("--json", help="one JSON object on standard output")]

app = typer.Typer(help="Parameters of the running pool.", no_args_is_help=True)


@app.command("get")
def get(
    names: Annotated[list[str] | None, typer.Argument(help="only these [all]", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Print parameters with their defaults and what they mean."""
    import orjson

    from shared.model.parameters import Parameters

    values = request("GET", "parameters")
    if unknown := set(names or ()) - values.keys():
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: not among {', '.join(values)}", param_hint="NAMES")
    chosen = {name: values[name] for name in names or values}
    if json:
        typer.echo(orjson.dumps(chosen))
    else:
        output().print(_table(chosen, Parameters))


@app.command("set")
def set_(
    changes: Annotated[list[str], typer.Argument(help="such as lam=0.05 cache_policy=regret")],
    reason: Reason = "",
    by: By = None,
) -> None:
    """Change parameters, all of them or none: an event that every service folds."""
    try:
        wanted = parse_changes(changes)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="CHANGES") from error
    ask("parameters", reason, by, changes=wanted)


def _table(values: dict[str, Any], form: Any) -> Any:
    from rich.table import Table

    shown = Table("parameter", "value", "default", "what it is")
    for name, value in values.items():
        field = form.model_fields.get(name)
        default = "" if field is None else str(field.default)
        changed = str(value) != default
        shown.add_row(
            name, f"[bold]{value}[/]" if changed else str(value), default, (field and field.description) or ""
        )
    return shown
