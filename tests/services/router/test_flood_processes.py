"""One tenant floods a pool of real processes: what another tenant asks for is neither held back nor behind the flood."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from router_pool import MODEL, RouterPool, pool_at_work

from shared.contracts.events import PrefillStarted, RequestAssigned, RequestCompleted, RequestHeld, RequestReceived
from shared.contracts.ids import RequestId
from tests.support.replica import eventually, witness

FLOOD, OTHERS = 32, 3
SHARING = {"tenants": {"many": {}, "few": {}}, "share_s": 0}
"""A tenant may have one request at a time on the workers, and more where a worker has nothing to do."""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RouterPool]:
    with pool_at_work(tmp_path, speedup=10) as made:
        yield made


async def test_another_tenant_is_served_amid_a_flood(pool: RouterPool) -> None:
    async with witness(pool.nats) as seen, httpx.AsyncClient(timeout=120) as http:
        change = {"asked_by": "ops", "changes": SHARING}
        (await http.post(f"{pool.controller.url}/v1/operator/parameters", json=change)).raise_for_status()

        async def ask(tenant: str, number: int) -> None:
            body = {"model": MODEL, "max_tokens": 1, "prompt": [number] * 3_000}
            answer = await http.post(f"{pool.api}/completions", json=body, headers={"x-vertumnus-tenant": tenant})
            answer.raise_for_status()

        flood = [asyncio.create_task(ask("many", number)) for number in range(FLOOD)]
        await eventually(lambda: len(seen.all(RequestHeld)) >= FLOOD // 2)
        for number in range(OTHERS):
            await ask("few", 1_000 + number)
        await asyncio.gather(*flood)
        await eventually(lambda: len(seen.all(RequestCompleted)) == FLOOD + OTHERS)
        events = [each.data for each in seen.events]
    asked = {each.request: each.tenant for each in events if isinstance(each, RequestReceived)}
    few = [request for request, tenant in asked.items() if tenant == "few"]
    assert len(few) == OTHERS
    held = [asked[each.request] for each in events if isinstance(each, RequestHeld)]
    assert set(held) == {"many"}, "whoever has nothing at the workers waits for nobody's turn"
    order = [(type(each), each.request) for each in events if isinstance(each, (RequestAssigned, PrefillStarted))]
    placed = {each.request: each.worker for each in events if isinstance(each, RequestAssigned)}
    for request in few:
        between = order[order.index((RequestAssigned, request)) : order.index((PrefillStarted, request))]
        before = [each for kind, each in between if kind is PrefillStarted and placed[each] == placed[request]]
        assert len(before) <= 1, "of the flood one lies before it at its worker at most"
    assert left(order, asked, few[-1]), "the flood was not over by then"


def left(order: list[tuple[type, RequestId]], asked: dict[RequestId, str], last: RequestId) -> list[RequestId]:
    """Of the flood, what began behind the other tenant's last request."""
    behind = order[order.index((PrefillStarted, last)) :]
    return [request for kind, request in behind if kind is PrefillStarted and asked[request] == "many"]
