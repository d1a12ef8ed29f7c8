"""Files that a command writes: whole, or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole(out: Path) -> Iterator[BinaryIO]:
    """A file to write into, which gets its name when everything is in it; after an error there is none.

    Errors: OSError.
    """
    partial = out.with_name(f"{out.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
