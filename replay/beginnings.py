"""What each deciding process began its fold with: it says so in its first event, because its settings are nowhere else."""

from collections.abc import Iterable
from typing import NamedTuple

from pydantic import ValidationError

from shared.contracts.envelope import Stored
from shared.contracts.events import CacheLeadershipTaken, LeadershipTaken, RouterRegistered
from shared.contracts.ids import Source
from shared.model import keepsake as keepsake_model
from shared.model.cost import Coefficients
from shared.model.keepsake import LASTING, Keepsake

TYPES = (RouterRegistered.TYPE, LeadershipTaken.TYPE, CacheLeadershipTaken.TYPE)


class Beginning(NamedTuple):
    """A fold that begins with the log's event `first_seq`, behind what was kept of older ones if there was anything, and with
    `coefficients` if it prices anything."""

    first_seq: int
    has_kept: bool
    coefficients: str
    """As JSON, so that equal beginnings are equal keys; empty if the process did not say."""

    def cost_model(self) -> Coefficients | None:
        """None if the process did not say, or said what this version cannot read."""
        if not self.coefficients:
            return None
        try:
            return Coefficients.model_validate_json(self.coefficients)
        except ValidationError:
            return None


class Registration(NamedTuple):
    """One process that has said how it began, in an event of type `kind`: it had folded the log up to `seen_seq` then."""

    kind: str
    source: Source
    begun: Beginning
    seen_seq: int


def registration(stored: Stored) -> Registration | None:
    """What the event says of its process; None for other events."""
    kind, source = stored.event.type, stored.event.source
    match stored.data:
        case RouterRegistered() as data:
            begun = Beginning(data.first_seq, data.kept_events > 0, _json(data.coefficients))
            return Registration(kind, source, begun, data.seen_seq)
        case LeadershipTaken() as data:
            begun = Beginning(data.first_seq, data.kept_events > 0, "")
        case CacheLeadershipTaken() as data:
            begun = Beginning(data.first_seq, data.kept_events > 0, _json(data.coefficients))
        case _:
            return None
    return Registration(kind, source, begun, stored.stream_seq - 1)


class Past:
    """What is kept of the events so far: where a fold begins whose log has dropped them. `inherited` is of an earlier log."""

    __slots__ = ("_keepsake",)

    def __init__(self, inherited: Iterable[Stored] = ()) -> None:
        self._keepsake = Keepsake()
        for each in inherited:
            self.fold(each)

    def fold(self, stored: Stored) -> None:
        """The next event of the log."""
        keepsake_model.evolve(self._keepsake, stored)

    @property
    def events(self) -> list[Stored]:
        """All of them, in the order of the log."""
        return list(self._keepsake.kept.values())

    def kept(self, begun: Beginning) -> list[Stored]:
        """The events that a process folds first, if the log begins behind what was folded here."""
        return [each._replace(kept=True) for each in self._keepsake.kept.values()] if begun.has_kept else []

    def legacy(self) -> list[Stored]:
        """What a later log inherits of this one: nothing that speaks of its sequences or of processes that ended with it."""
        return [each._replace(stream_seq=0) for each in self._keepsake.kept.values() if isinstance(each.data, LASTING)]


def _json(coefficients: dict[str, float | str]) -> str:
    if not coefficients:
        return ""
    try:
        return Coefficients.model_validate(coefficients).model_dump_json()
    except ValidationError:
        return ""
