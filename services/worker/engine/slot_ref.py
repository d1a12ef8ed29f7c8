"""How a slot's content is named, by whoever stores, reads or copies it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotRef:
    """One content of one slot. Readers compare `generation` with the slot's after the read."""

    rank: int
    index: int
    generation: int
