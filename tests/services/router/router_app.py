"""The HTTP surface of a router in memory, before one scripted agent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import APIRouter, FastAPI
from router_front import Agent, Front, front

from services.router.entrance import Parts
from services.router.http import build_app
from services.router.placements import Placements
from services.router.prompts import Prompts
from services.router.refusals import Refusals
from services.router.tokenizer import ModelText, TextThreads

KEY = b"k" * 32


def app_of(router: Front, text: ModelText | None = None) -> tuple[FastAPI, Refusals, Placements]:
    metrics = router.dispatcher._metrics
    refusals = Refusals(router.outbox, router.clock, metrics)
    placements = Placements(router.dispatcher, router.outbox, router.settings, router.clock, metrics)
    prompts = Prompts(text, TextThreads(1), KEY, router.settings.output_tokens_max)
    parts = Parts(router.settings, router.dispatcher, placements, prompts, refusals, router.clock, router.ids)
    return build_app(parts, APIRouter()), refusals, placements


@asynccontextmanager
async def served(
    tmp_path: Path, agent: Any = None, text: ModelText | None = None, engine: str = "modelled", **settings: Any
) -> AsyncIterator[tuple[Front, httpx.AsyncClient]]:
    async with front(tmp_path, **settings) as router:
        await Agent(router, "n0", agent).start((4,), block_tokens=16, engine=engine)
        app, refusals, placements = app_of(router, text)
        await refusals.start()
        await placements.start()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            yield router, client
        placements.stop()
        refusals.stop()
