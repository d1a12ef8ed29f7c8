"""Files that a command writes: whole, or not at all."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole(out: Path) -> Iterator[BinaryIO]:
    """A file to write into, which gets its name when everything is in it and on disk; after an error there is none.

    Errors: OSError, BlockingIOError while somebody else writes the same one.
    """
    partial = out.with_name(f"{out.name}.partial")
    with partial.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)
