"""The paper's reconfiguration policy: thresholds on windows (section 4.3). Pure: a sight in, at most one step out.

    overload  for m windows                      → split, if it adds capacity
    underload for m windows                      → merge, if what is left carries the peak of those m windows
    more-long for m windows, demand stable       → merge, likewise
    fewer-long for m windows, demand stable      → split

Capacity wins a conflict with the mix, also where no step of its kind is left. One step at a time: the next waits for the
commit or abort of the last, and then for m windows more. No split may leave the pool unable to take a prompt that it can
take now. Among what is left the least drain is taken, then the least traffic (`steps.ranked`).
"""

from typing import NamedTuple

from services.controller.signals import Signal, is_stable, is_sustained, peak_demand_us
from services.controller.steps import Kind, Sight, Step, holds_tokens, ranked, steps

NAME = "paper"

CAPACITY: dict[Signal, Kind] = {"overload": "split", "underload": "merge"}
MIX: dict[Signal, Kind] = {"more-long": "merge", "fewer-long": "split"}


class Proposal(NamedTuple):
    """A signal that calls for a step, and the admissible steps of its kind, best first. The first is to be taken."""

    signal: Signal
    kind: Kind
    steps: tuple[Step, ...]


def propose(sight: Sight) -> Proposal | None:
    """What should be done after this window, if anything."""
    if sight.moving or (called := wanted(sight)) is None:
        return None
    signal, kind = called
    found = ranked(each for each in steps(sight, kind) if is_admissible(sight, signal, each))
    return Proposal(signal, kind, tuple(found)) if found else None


def wanted(sight: Sight) -> tuple[Signal, Kind] | None:
    """The sustained signal that counts."""
    window, parameters = sight.window, sight.parameters
    for signal, kind in CAPACITY.items():
        if is_sustained(signal, window, parameters):
            return signal, kind
    if is_stable(window, parameters):
        for signal, kind in MIX.items():
            if is_sustained(signal, window, parameters):
                return signal, kind
    return None


def is_admissible(sight: Sight, signal: Signal, step: Step) -> bool:
    """Whether the adjacent composition would do."""
    if step.holds_tokens < holds_tokens(sight.nodes):
        return False
    if signal == "overload":
        return step.capacity_us > sight.window.capacity_us
    peak_us = peak_demand_us(sight.window, sight.parameters)
    return signal == "fewer-long" or peak_us <= sight.parameters.up * step.capacity_us
