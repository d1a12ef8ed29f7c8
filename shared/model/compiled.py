"""Loops over arrays as machine code (ADR 33).

Plain functions, compiled by numba when their module is imported, or read from where an earlier process kept their machine
code. Operations are neither reordered nor fused, which is numba's default, so every microsecond is the same on every machine.
What was kept is used until the function's file changes: constants of other files are compiled in.
"""

from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any, TypeVar, cast

from numba import njit

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(signature: str) -> Callable[[_Function], _Function]:
    """Compile now, so that nobody waits for it later. Machine code is kept beside the source, or in the user's cache folder.
    Where neither can be written or the disk is full, and where what is kept was cut off, every process compiles for itself."""

    def compile_(function: _Function) -> _Function:
        try:
            found = njit(signature, cache=True, error_model="numpy")(function)
        except (RuntimeError, OSError, EOFError, UnpicklingError) as error:
            if isinstance(error, RuntimeError) and "no locator available" not in str(error):
                raise
            found = njit(signature, error_model="numpy")(function)
        return cast(_Function, found)

    return compile_


def kept_in(function: Callable[..., Any]) -> str | None:
    """Where the machine code is kept; None if this process has compiled it for itself."""
    folder: str | None = cast(Any, function).stats.cache_path
    return folder
