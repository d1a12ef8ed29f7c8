"""Requests that were refused before they were received: counted, and told to the log once per second, tenant and reason."""

import asyncio
from collections import Counter
from typing import Literal

import structlog

from services.router.metrics import RouterMetrics
from shared.contracts.events import RequestsRefused
from shared.contracts.ids import TenantId
from shared.model.tenants import OTHERS
from shared.runtime.clock import Clock
from shared.runtime.outbox import Outbox, OutboxFull

TELL_EVERY_S = 1.0

TOLD_MAX = 64
"""Tenants and reasons that are told apart in one second."""

RefusalReason = Literal[
    "invalid", "unauthorized", "unknown-model", "too-large", "too-long", "overloaded", "no-worker", "shutdown"
]


class Refusals:
    """A flood of bad requests costs the log one event per second and reason."""

    def __init__(self, outbox: Outbox, clock: Clock, metrics: RouterMetrics) -> None:
        self._outbox = outbox
        self._clock = clock
        self._metrics = metrics
        self._counts: Counter[tuple[TenantId, RefusalReason]] = Counter()
        self._teller: asyncio.Task[None] | None = None
        self._logger = structlog.get_logger(component="refusals")

    async def start(self) -> None:
        self._teller = asyncio.create_task(self._tell_forever(), name="refusals")

    def stop(self) -> None:
        """Tell what is left."""
        if self._teller is not None:
            self._teller.cancel()
        self._tell()

    def count(self, tenant: TenantId, reason: RefusalReason) -> None:
        self._metrics.refused.labels(reason).inc()
        if len(self._counts) >= TOLD_MAX and (tenant, reason) not in self._counts:
            tenant = OTHERS  # names may be made up
        self._counts[tenant, reason] += 1

    async def _tell_forever(self) -> None:
        while True:
            await self._clock.sleep(TELL_EVERY_S)
            self._tell()

    def _tell(self) -> None:
        """What the outbox has no room for is told a second later."""
        if not self._counts:
            return
        facts = [
            RequestsRefused(tenant=tenant, reason=reason, count=count)
            for (tenant, reason), count in sorted(self._counts.items())
        ]
        try:
            self._outbox.record(facts)
        except OutboxFull as full:
            self._logger.warning("refusals not told", error=str(full))
            return
        self._counts.clear()
