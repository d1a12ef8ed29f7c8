"""What all options have in common."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import typer

from cli.main import app


def commands(of: typer.Typer) -> Iterator[Callable[..., Any]]:
    yield from (command.callback for command in of.registered_commands if command.callback is not None)
    for group in of.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance)


def test_a_number_with_a_fraction_has_an_upper_limit_so_that_neither_inf_nor_nan_is_one() -> None:
    """But for the end of a trace, which need not have one."""
    without = set()
    for command in commands(app):
        for name, hint in get_type_hints(inspect.unwrap(command), include_extras=True).items():
            kind, *notes = get_args(hint) or (hint,)
            options = [note for note in notes if hasattr(note, "max")]
            if float in (kind, *get_args(kind)) and not any(option.max is not None for option in options):
                without.add(name)
    assert without == {"end_s"}
