"""Another composition for a node of a running system: asked of its controller as an operator does, awaited on its record."""

from typing import Any, NamedTuple
from uuid import uuid4

import httpx

from cli.embedded.data_dir import RunningSystem
from shared.contracts.events import EpochAborted, EpochCommitted, ReconfigurationPlanned
from shared.contracts.ids import NodeId
from shared.model.cost import US_PER_S
from shared.model.lattice import Composition
from shared.runtime.clock import Clock

LIMIT_S = 120.0
"""For all of it, on a machine that has little time: a saga takes at most 20 s, and the record may lag."""

POLL_S = 0.25
NOT_NOW = (409, 503)
"""The node is being reconfigured, or the controller has just died: asked again, either passes."""


class NotMoved(Exception):
    """The reconfiguration was refused, or its end is not on the record. The message says which."""


class Moved(NamedTuple):
    """How a reconfiguration ended: `why_not` for an aborted one, else how long the drain and the switch took."""

    composition: Composition
    drain_s: float = 0.0
    switch_s: float = 0.0
    why_not: str | None = None


async def pin(system: RunningSystem, node: NodeId, asked_by: str, clock: Clock) -> None:
    """Leave the node's compositions to whoever calls `move`. Errors: NotMoved."""
    deadline_ns = clock.monotonic_ns() + round(LIMIT_S * 1e9)
    async with _operator(system) as client:
        await _ask(client, f"{node} to be pinned", "pin", {"asked_by": asked_by, "node": node}, clock, deadline_ns)


async def move(system: RunningSystem, node: NodeId, composition: Composition, asked_by: str, clock: Clock) -> Moved:
    """Errors: NotMoved."""
    mark, deadline_ns = uuid4().hex, clock.monotonic_ns() + round(LIMIT_S * 1e9)
    body = {"asked_by": asked_by, "reason": mark, "node": node, "composition": list(composition)}
    async with _operator(system) as client:
        if not await _ask(client, f"{node} to {composition}", "reconfigure", body, clock, deadline_ns):
            return Moved(composition)
        while clock.monotonic_ns() < deadline_ns:
            if (moved := await _ended(client, system.console_url, mark)) is not None:
                return moved
            await clock.sleep(POLL_S)
    raise NotMoved(f"{node} to {composition}: no end on the record within {LIMIT_S:.0f} s")


def _operator(system: RunningSystem) -> httpx.AsyncClient:
    key = {"Authorization": f"Bearer {system.operator_key_file.read_text().strip()}"}
    url = f"{system.services['controller'].url}/v1/operator/"
    return httpx.AsyncClient(base_url=url, headers=key, timeout=LIMIT_S, trust_env=False)


async def _ask(
    client: httpx.AsyncClient, what: str, command: str, body: dict[str, Any], clock: Clock, deadline_ns: int
) -> list[str]:
    """The events that came of it, as soon as the controller can. Errors: NotMoved."""
    asked = await client.post(command, json=body)
    while asked.status_code in NOT_NOW and clock.monotonic_ns() < deadline_ns:
        await clock.sleep(POLL_S)
        asked = await client.post(command, json=body)
    if asked.is_error:
        raise NotMoved(f"{what}: {asked.text[:200]}")
    events: list[str] = asked.json()["events"]
    return events


async def _ended(client: httpx.AsyncClient, record_url: str, mark: str) -> Moved | None:
    """The end of the plan with this mark, once the record has both."""
    for plan in await _events(client, record_url, type=ReconfigurationPlanned.TYPE):
        if plan["reason"] != mark:
            continue
        correlation = f"{plan['node']}/{plan['epoch']}"
        for end in await _events(client, record_url, type=EpochCommitted.TYPE, correlation=correlation):
            return Moved(tuple(end["composition"]), end["drain_us"] / US_PER_S, end["switch_us"] / US_PER_S)
        for end in await _events(client, record_url, type=EpochAborted.TYPE, correlation=correlation):
            return Moved(tuple(plan["old_composition"]), why_not=end["reason"])
    return None


async def _events(client: httpx.AsyncClient, record_url: str, **wanted: str) -> list[dict[str, Any]]:
    """What these events say; none while the record is away."""
    try:
        answer = (await client.get(f"{record_url}/v1/events", params={"limit": "1000", **wanted})).raise_for_status()
    except httpx.HTTPError:
        return []
    return [each["data"] for each in answer.json()["events"]]
