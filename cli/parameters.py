"""Parameters as an operator writes them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.model.parameters import Parameters


def parse_changes(texts: Sequence[str]) -> dict[str, str]:
    """`lam=0` and the like, by name. Errors: ValueError."""
    changes: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text}: write it as name=value")
        if name in changes:
            raise ValueError(f"{text}: {name} is given twice")
        changes[name] = value
    return changes


def unheeded(parameters: "Parameters", names: Iterable[str]) -> list[str]:
    """A line for each of the named parameters that nobody decides by now."""
    from shared.model.ignored import ignored

    found = ignored(parameters)
    return [f"{name}: nothing reads it now; it is read with {found[name]}" for name in names if name in found]
