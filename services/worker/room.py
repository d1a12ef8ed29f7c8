"""What a worker's next steps are after one that found no room for its KV blocks. Pure.

The rule, in order of what is tried:

1.  Fewer requests go first, because together they may need more than each of them does.
2.  A single request leaves it to the prompts that were begun: they have all their blocks, and give them up when they end.
3.  It waits while finished prefills hold blocks: their first token or hand-off is on its way.
4.  It waits for copies and leases, which end by themselves, but as there may always be new ones, only for `PASSING_NS_MAX`.
5.  It is given up.
"""

from typing import Literal

from services.worker.engine.protocol import STEP_ITEMS_MAX
from services.worker.transfers import COPY_LEASE_S

PASSING_NS_MAX = round((COPY_LEASE_S + 5) * 1e9)
"""Copies and leases that were there at first have ended by then."""


class Room:
    """One per worker. A step takes at most `items_max` requests, and with `begun_only` only prompts that were begun."""

    def __init__(self) -> None:
        self.items_max = STEP_ITEMS_MAX
        self.begun_only = False
        self._short_since_ns: int | None = None

    def found(self) -> None:
        """A step had room."""
        self.items_max, self.begun_only, self._short_since_ns = STEP_ITEMS_MAX, False, None

    def none_begun(self) -> None:
        """No prompt that was begun waits any more."""
        self.begun_only = False

    def lacking(
        self, items: int, now_ns: int, *, begun: bool, others_hold: bool, passing: bool
    ) -> Literal["again", "wait", "give-up"]:
        """A step of `items` requests had none: what becomes of them. `begun` says that others are queued which were begun."""
        if items > 1:
            self.items_max = items // 2
            return "again"
        if begun:
            self.begun_only = True
            return "again"
        if others_hold:
            return "wait"
        self._short_since_ns = now_ns if self._short_since_ns is None else self._short_since_ns
        if passing and now_ns - self._short_since_ns < PASSING_NS_MAX:
            return "wait"
        self._short_since_ns = None
        return "give-up"
