"""How an old version of an event becomes the next one: pure functions from JSON to JSON, one version at a time.

Empty while every event is at version 1. To change an event: keep its golden file, register the new version, add
`UPCASTS["type", old_version]` here, and a test that takes the old golden file through it.
"""

from collections.abc import Callable, Mapping

from shared.contracts.envelope import Json

UPCASTS: Mapping[tuple[str, int], Callable[[Json], Json]] = {}


def upcast(tag: str, version: int, data: Json) -> tuple[int, Json]:
    """`data` and its version after every upcaster that applies."""
    while step := UPCASTS.get((tag, version)):
        data, version = step(data), version + 1
    return version, data
