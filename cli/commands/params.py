"""`vertumnus params`: what the pool decides by, and changes of it, which are events."""

from typing import Annotated, Any

import typer

from cli.commands.operate import By, Reason, ask, request
from cli.parameters import parse_changes, unheeded
from cli.terminal import output

Json = Annotated[bool, typer.Option("--json", help="one JSON object on standard output")]

app = typer.Typer(help="Parameters of the running pool.", no_args_is_help=True)


@app.command("get")
def get(
    names: Annotated[list[str] | None, typer.Argument(help="only these [all]", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Print parameters, the values that new pools begin with, and what they mean."""
    import orjson

    from shared.model.parameters import unlike_new_pools

    values = request("GET", "parameters")
    if unknown := set(names or ()) - values.keys():
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: not among {', '.join(values)}", param_hint="NAMES")
    chosen = {name: values[name] for name in names or values}
    if json:
        typer.echo(orjson.dumps(chosen))
    else:
        output().print(_table(chosen))
        if not names and (unlike := unlike_new_pools(values)):
            output().print(_otherwise(values, unlike), markup=False, soft_wrap=True)


@app.command("set")
def set_(
    changes: Annotated[list[str], typer.Argument(help="such as lam_vertumnus=0.02 cache_policy=lru")],
    reason: Reason = "",
    by: By = None,
) -> None:
    """Change parameters, all of them or none: an event that every service folds.

    On standard error it says which of them the policies in force do not read.
    """
    from shared.model.parameters import Parameters

    try:
        wanted = parse_changes(changes)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="CHANGES") from error
    ask("parameters", reason, by, changes=wanted)
    # A standby may answer, which has not folded the change yet; a controller of another version may have others.
    values = {**request("GET", "parameters"), **wanted}
    known = {name: value for name, value in values.items() if name in Parameters.model_fields}
    for line in unheeded(Parameters.model_validate(known), wanted):
        typer.echo(line, err=True)


def _table(values: dict[str, Any]) -> Any:
    from rich.table import Table

    from shared.model.parameters import RECOMMENDED, Parameters

    shown = Table("parameter", "value", "new pools", "what it is")
    for name, value in values.items():
        field = Parameters.model_fields.get(name)
        begun = "" if field is None or name == "version" else _written(RECOMMENDED.get(name, field.default))
        is_ = _written(value)
        changed = begun and is_ != begun
        shown.add_row(name, f"[bold]{is_}[/]" if changed else is_, begun, (field and field.description) or "")
    return shown


def _written(value: Any) -> str:
    """As `params set` takes it."""
    import orjson

    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _otherwise(values: dict[str, Any], unlike: dict[str, Any]) -> str:
    """That a pool decides otherwise than new ones, and how it would not."""
    from cli.invocation import command

    why = "New pools begin with other policies. To have them here:"
    if not values["version"]:
        why = "This pool is older than the policies that new ones begin with, and runs on the paper's. To have the new ones:"
    return f"{why}\n  {command()} params set {' '.join(f'{name}={value}' for name, value in unlike.items())}"
