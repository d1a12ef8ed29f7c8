"""What the deciders had folded at a place of the record: with it, what follows is decided again without what is before.

Kept are the state of each way in which a process has begun its fold, folded up to the place, and who was deciding then. A
process may have seen less at that moment than lies before the place; what it decided on less is not derivable from here, and is
said to be. Everything that was decided on the place or later comes out as it does from the beginning.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from replay.beginnings import Beginning, Past, Registration
from shared.contracts.envelope import Stored
from shared.contracts.ids import RequestId, Source
from shared.runtime.states import BadState, freeze, thaw

PACKAGES = ("shared", "services", "replay")
"""Where the classes of a state are."""

EARLIER = "its process had seen less than where this folding begins"


class Fold(NamedTuple):
    """A way to begin, of processes whose first event is of type `kind`: the frozen state, with what it has not folded yet."""

    kind: str
    begun: Beginning
    frozen: bytes

    def state(self) -> tuple[Any, tuple[Stored, ...]]:
        """A copy of its own. Errors: BadState."""
        state, pending = thaw(self.frozen, PACKAGES)
        return state, pending


class Frozen(NamedTuple):
    """Right after event `stream_seq` of a log. `living` routers had registered and were not forgotten, `undecided` requests
    were received and not placed yet."""

    stream_seq: int
    past: Past
    registrations: tuple[Registration, ...]
    living: frozenset[Source]
    undecided: frozenset[RequestId]
    folds: tuple[Fold, ...]

    def fold_of(self, kind: str, begun: Beginning) -> Fold | None:
        return next((each for each in self.folds if (each.kind, each.begun) == (kind, begun)), None)

    def covers(self, registrations: Iterable[Registration]) -> bool:
        """Whether processes that register later can be followed from here: they begin later, too, or as one before them."""
        return all(
            each.begun.first_seq > self.stream_seq or self.fold_of(each.kind, each.begun) is not None
            for each in registrations
            if each.seen_seq >= self.stream_seq
        )


def fold(kind: str, begun: Beginning, state: Any, pending: Sequence[Stored]) -> Fold:
    """The state as it is now, and what is still to be folded."""
    return Fold(kind, begun, freeze((state, tuple(pending))))


def together(parts: Sequence[Frozen]) -> Frozen:
    """One place, kept by several, each of which has folded for its part of the processes."""
    first = parts[0]
    return first._replace(
        living=frozenset().union(*(each.living for each in parts)),
        undecided=frozenset().union(*(each.undecided for each in parts)),
        folds=tuple({(each.kind, each.begun): each for part in parts for each in part.folds}.values()),
    )


def read(raw: bytes) -> Frozen:
    """Errors: BadState."""
    found = thaw(raw, PACKAGES)
    if not isinstance(found, Frozen):
        raise BadState("it is not what deciders have folded")
    return found


def known(frozen: Frozen | None, later: Collection[Registration]) -> list[Registration]:
    """Every process that has said how it began, of before the place too."""
    before = frozen.registrations if frozen is not None else ()
    return [*before, *(each for each in later if each not in before)]
