"""What a verb looks like in SGLang's `POST /set_internal_state`: a flat map from names to numbers, all that passes there.

A composition travels as the bit mask of the units that begin a group: (2, 1, 1) is 0b1101. Fields from `_CONTROLLER`
down are written by the data-parallel controller, which knows what is in force, and overwrite whatever a client put there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from shared.model.lattice import RANKS_MAX, Composition, groups_of

Numbers = Mapping[str, int | float]

EVICT_BLOCKS_MAX = 64
"""Blocks in one verb: each costs a walk over the tree while its unit serves nobody."""

LEASE_S_MAX = 600.0
VOTE_S_MAX = 60.0


class Op(IntEnum):
    """The verbs."""

    PREPARE = 1
    COMMIT = 2
    RELEASE = 3
    EVICT = 4


@dataclass(frozen=True, slots=True)
class Prepare:
    """Hold work for the units that `composition` touches, until released or for `lease_s`. Units answer whether they
    are idle and may switch. Repeating it renews the lease."""

    epoch: int
    composition: Composition
    lease_s: float


@dataclass(frozen=True, slots=True)
class Commit:
    """Vote and decide, with `vote_s` for the votes to arrive."""

    epoch: int
    composition: Composition
    vote_s: float


@dataclass(frozen=True, slots=True)
class Release:
    """Let held work flow by the composition in force. An epoch that was prepared and not committed ends here."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Remove these blocks (64-bit hashes, as in SGLang's KV events) and all below them, on units of the mask that are idle
    enough. Answered with true by units that removed something."""

    units: int
    blocks: tuple[int, ...]


Verb = Prepare | Commit | Release | Evict


@dataclass(frozen=True, slots=True)
class InForce:
    """What the controller adds: the composition that units have now, and whether the verb came too late to be carried
    out."""

    composition: Composition
    lapsed: bool = False


_CONTROLLER = ("vertumnus_in_force", "vertumnus_lapsed")


def mask_of(composition: Composition) -> int:
    """The units that begin a group."""
    return sum(1 << group.first_rank for group in groups_of(composition))


def composition_of(mask: int, units: int) -> Composition:
    """The composition of `units` units. ValueError for a mask that is none."""
    if not 0 < units <= RANKS_MAX or mask >> units or not mask & 1:
        raise ValueError(f"composition mask {mask:#b}: unit 0 begins a group, and there are {units} units")
    starts = [unit for unit in range(units) if mask >> unit & 1]
    composition = tuple(end - start for start, end in zip(starts, [*starts[1:], units], strict=True))
    groups_of(composition)
    return composition


def encode(verb: Verb) -> dict[str, int | float]:
    """The verb as SGLang carries it. ValueError names a field that is out of bounds."""
    match verb:
        case Prepare(epoch, composition, lease_s):
            _within("lease_s", lease_s, LEASE_S_MAX)
            return {
                **_switch(Op.PREPARE, epoch),
                "vertumnus_starts": mask_of(composition),
                "vertumnus_lease_s": lease_s,
            }
        case Commit(epoch, composition, vote_s):
            _within("vote_s", vote_s, VOTE_S_MAX)
            return {**_switch(Op.COMMIT, epoch), "vertumnus_starts": mask_of(composition), "vertumnus_vote_s": vote_s}
        case Release(epoch):
            return _switch(Op.RELEASE, epoch)
        case Evict(units, blocks):
            if not 0 < len(blocks) <= EVICT_BLOCKS_MAX:
                raise ValueError(f"blocks: {len(blocks)} of them; one verb takes 1 to {EVICT_BLOCKS_MAX}")
            numbered = {f"vertumnus_block_{index:02}": block for index, block in enumerate(blocks)}
            return {"vertumnus_op": Op.EVICT, "vertumnus_units": units, **numbered}


def decode(numbers: Numbers, units: int) -> Verb | None:
    """The verb in a message, None if the message is none of ours. ValueError says what is wrong with one of ours."""
    if "vertumnus_op" not in numbers:
        return None
    try:
        op = Op(_whole(numbers, "vertumnus_op"))
        if op is Op.EVICT:
            names = sorted(name for name in numbers if name.startswith("vertumnus_block_"))
            verb: Verb = Evict(_whole(numbers, "vertumnus_units"), tuple(_whole(numbers, name) for name in names))
        elif op is Op.RELEASE:
            verb = Release(_whole(numbers, "vertumnus_epoch"))
        else:
            epoch = _whole(numbers, "vertumnus_epoch")
            composition = composition_of(_whole(numbers, "vertumnus_starts"), units)
            verb = (
                Prepare(epoch, composition, float(numbers["vertumnus_lease_s"]))
                if op is Op.PREPARE
                else Commit(epoch, composition, float(numbers["vertumnus_vote_s"]))
            )
    except KeyError as missing:
        raise ValueError(f"a verb without {missing}") from None
    except OverflowError as error:  # JSON has numbers that no float holds, and SGLang passes infinity on
        raise ValueError(f"a number out of all bounds: {error}") from None
    encode(verb)
    return verb


def tell(numbers: Numbers, in_force: InForce) -> dict[str, int | float]:
    """The message as the controller passes it on."""
    return {**numbers, **dict(zip(_CONTROLLER, (mask_of(in_force.composition), int(in_force.lapsed)), strict=True))}


def told(numbers: Numbers, units: int) -> InForce:
    """What the controller wrote. ValueError for a message that did not pass through it."""
    try:
        mask, lapsed = (_whole(numbers, name) for name in _CONTROLLER)
    except KeyError as missing:
        raise ValueError(f"a verb that did not pass the controller: no {missing}") from None
    return InForce(composition_of(mask, units), bool(lapsed))


def _switch(op: Op, epoch: int) -> dict[str, int | float]:
    if not 0 < epoch < 1 << 53:
        raise ValueError(f"epoch: {epoch} is not between 1 and 2^53")
    return {"vertumnus_op": op, "vertumnus_epoch": epoch}


def _within(name: str, value: float, most: float) -> None:
    if not 0 < value <= most:
        raise ValueError(f"{name}: {value} is not above 0 and at most {most}")


def _whole(numbers: Numbers, name: str) -> int:
    value = numbers[name]
    if value != int(value):
        raise ValueError(f"{name}: {value} is no whole number")
    return int(value)
