"""What comparing decisions gives: how many of each type, those that could not be derived again, and those that differ."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shared.contracts.envelope import EventData

DIFFERENCES_KEPT_MAX = 100
"""More are counted, not kept."""

RECORDED_INPUTS = "request-assigned, from recorded inputs"
"""Placements are checked twice: with the inputs that they recorded, and on the state that was folded."""


class Difference(NamedTuple):
    """A decision that comes out otherwise. `field` is the first one in which it does, as a path."""

    log: str
    stream_seq: int
    type: str
    about: str
    field: str
    recorded: Any
    derived: Any

    def __str__(self) -> str:
        return (
            f"{self.log}:{self.stream_seq} {self.type} {self.about}: {self.field} is recorded as {self.recorded!r}, "
            f"and derived as {self.derived!r}"
        )


class Place(NamedTuple):
    """Where a decision lies, and what it belongs to."""

    log: str
    stream_seq: int
    about: str


@dataclass(slots=True)
class Findings:
    """Counts are by event type; `skipped` by type and reason."""

    checked: Counter[str] = field(default_factory=Counter)
    differing: Counter[str] = field(default_factory=Counter)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)

    def compare(self, place: Place, what: str, recorded: EventData, derived: Sequence[EventData]) -> None:
        """Count one decision. `derived` are the outcomes that the state allows; one of them must be the recorded one."""
        self.checked[what] += 1
        if recorded in derived:
            return
        self.differing[what] += 1
        if len(self.differences) < DIFFERENCES_KEPT_MAX:
            path, there, here = _first_difference(recorded, derived)
            self.differences.append(Difference(*place[:2], what, place.about, path, there, here))

    def skip(self, what: str, reason: str) -> None:
        """Count one decision that cannot be derived again."""
        self.skipped[what, reason] += 1

    @property
    def clean(self) -> bool:
        return not self.differing.total()

    @classmethod
    def together(cls, parts: Sequence["Findings"]) -> "Findings":
        """What several have found, each in its part of the decisions. `differences` are in the order of each log."""
        whole = cls()
        for each in parts:
            whole.checked += each.checked
            whole.differing += each.differing
            whole.skipped += each.skipped
        found = [difference for each in parts for difference in each.differences]
        logs = {log: number for number, log in enumerate(dict.fromkeys(each.log for each in found))}
        found.sort(key=lambda difference: (logs[difference.log], difference.stream_seq, difference.type))
        whole.differences = found[:DIFFERENCES_KEPT_MAX]
        return whole


def _first_difference(recorded: EventData, derived: Sequence[EventData]) -> tuple[str, Any, Any]:
    alike = [each for each in derived if type(each) is type(recorded)]
    if not alike:
        return "decision", recorded.TYPE, [each.TYPE for each in derived]
    found = _differing("", recorded.model_dump(mode="json"), alike[0].model_dump(mode="json"))
    assert found is not None, "two events that differ have a field that does"
    return found


def _differing(path: str, one: Any, other: Any) -> tuple[str, Any, Any] | None:
    """The path of the first part in which two JSON values differ, and both parts."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in [*one, *(name for name in other if name not in one)]:
            inside = _differing(f"{path}.{name}" if path else name, one.get(name), other.get(name))
            if inside is not None:
                return inside
        return None
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        parts = (_differing(f"{path}[{n}]", *each) for n, each in enumerate(zip(one, other, strict=True)))
        return next((each for each in parts if each is not None), None)
    return None if one == other else (path, one, other)
