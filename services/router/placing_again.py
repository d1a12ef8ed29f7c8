"""Where a request goes whose attempt has ended: decided again, after the pause that such an end asks for."""

import asyncio
from collections.abc import Collection

from services.router import decider
from services.router.calls import Call, Unserved
from services.router.wiring import Placed, Wiring
from shared.contracts.events import RequestAssigned
from shared.contracts.ids import NodeId, node_of

PAUSE_S = 0.1
"""Before the third and every later attempt, times the attempts made: whoever refused twice needs a moment."""

SILENCE_S = 1.0
"""Between two questions to a node that does not answer, times the attempts made, unless somebody else can take the request
first. So four attempts outlast the 3 s after which a dead agent's node is declared lost, and its next incarnation is asked."""


async def place_again(wiring: Wiring, call: Call, last: Placed, *, pauses: bool) -> Placed:
    """The next assignment, recorded. Without `pauses` only a silent node is waited for.

    Errors: Unserved when no worker comes in time.
    """
    attempt = last.assigned.attempt
    if pauses and attempt > 1:
        await wiring.clock.sleep(PAUSE_S * attempt)
    placed = None
    opened = wiring.state.loads.open.get(call.request)
    if opened is not None and opened.silent:
        asked_s = (wiring.clock.now_ns() - last.assigned.now_ns) / 1e9
        wait_s = max(0.0, SILENCE_S * attempt - max(0.0, asked_s))
        placed = await _decided(wiring, call, last, wait_s, opened.silent)
    placed = placed or await _decided(wiring, call, last, wiring.settings.no_worker_wait_s)
    if placed is None:
        raise Unserved("no-worker", "no worker can take the request now", wiring.retry_after_s())
    return placed


async def _decided(
    wiring: Wiring, call: Call, last: Placed, seconds: float, spared: Collection[NodeId] = ()
) -> Placed | None:
    """None if in so many seconds nobody can take it who is on none of the `spared` nodes."""
    try:
        async with asyncio.timeout(seconds):
            while (placed := _decide(wiring, call, last, spared)) is None:
                await wiring.capacity_changed()
    except TimeoutError:
        return None
    return placed


def _decide(wiring: Wiring, call: Call, last: Placed, spared: Collection[NodeId]) -> Placed | None:
    facts = decider.assign_again(wiring.state, call.request, len(call.generated), wiring.moment())
    if any(isinstance(fact, RequestAssigned) and node_of(fact.worker) in spared for fact in facts):
        return None
    for event in wiring.record(call, facts, last):
        if isinstance(event.data, RequestAssigned):
            return Placed(event.data, event)
    return None
