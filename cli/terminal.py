"""What all commands print alike: how wide, and an error in the user's words."""

from pydantic import ValidationError
from rich.console import Console

PIPED_COLUMNS = 200
"""A file or a pipe has no width; at the 80 that would be assumed, tables cut numbers off."""


def output() -> Console:
    """Standard output: as wide as the terminal, or wide enough for every table of ours where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PIPED_COLUMNS)
    return console


def reason(error: Exception) -> str:
    """What went wrong, without the number that the system has for it; of settings the first that is wrong."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return ": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])
    return str(error)
