"""Python's search for unreachable objects, seldom while a record is folded."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_OBJECTS = 100_000
"""An event is some ten objects, and most of them stay. Without this, a third of the time that reading takes goes into looking
at what was just read."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """States hold no circles that come and go with events, so what is let go is free at once anyway.

    It may be entered again before it is left, in any order: whoever finds it seldom leaves it alone, so what was set before is
    what stays in the end.
    """
    before = gc.get_threshold()
    if before[0] >= EVERY_OBJECTS:
        yield
        return
    gc.set_threshold(EVERY_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
