"""The ledger's HTTP side: the record and what follows from it, read-only."""

from hmac import compare_digest
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from services.ledger import queries
from services.ledger.database import AWAY
from services.ledger.queries import EVENTS_MAX, EventFilter
from services.ledger.records import BIGINT_MAX

Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
Name = Annotated[str | None, Query(max_length=256)]


def app(pool: Any, probes: APIRouter, operator_key: str | None) -> FastAPI:
    """The application. With an `operator_key`, every query needs it as a bearer token; probes never do."""
    application = FastAPI(title="Vertumnus ledger", docs_url="/docs", redoc_url=None)

    async def operator(credentials: Bearer) -> None:
        if operator_key is None:
            return
        given = credentials.credentials if credentials else ""
        if not compare_digest(given.encode(), operator_key.encode()):
            raise HTTPException(401, "an operator's key is needed", {"WWW-Authenticate": "Bearer"})

    for kind in AWAY:
        application.add_exception_handler(kind, _database_away)
    application.include_router(probes)
    application.include_router(_queries(pool), dependencies=[Depends(operator)])
    return application


async def _database_away(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001 - the shape of a handler
    return JSONResponse({"detail": f"the record cannot be read now: {type(error).__name__}"}, 503, {"Retry-After": "1"})


def _queries(pool: Any) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/events")
    async def events(
        after: Annotated[str, Query(description="`SEQ` of the newest log, or `LOG:SEQ`", max_length=64)] = "0",
        kind: Annotated[str | None, Query(alias="type", max_length=256)] = None,
        correlation: Name = None,
        source: Name = None,
        limit: Annotated[int, Query(ge=1, le=EVENTS_MAX)] = 100,
    ) -> dict[str, Any]:
        """Events in stream order. `next` is the `after` of the following page."""
        async with pool.acquire() as connection:
            log, seq = await _place(connection, "after", after)
            if log is None:
                return {"events": [], "next": after}
            found = await queries.events(connection, log, seq, EventFilter(kind, correlation, source), limit)
        return {"events": found, "next": f"{log}:{found[-1]['stream_seq'] if found else seq}"}

    @router.get("/events/{name}")
    async def event(name: str) -> dict[str, Any]:
        """One event by its id, by `SEQ` of the newest log, or by `LOG:SEQ`."""
        async with pool.acquire() as connection:
            if (event_id := _uuid(name)) is not None:
                found = await queries.event_of_id(connection, event_id)
            else:
                log, seq = await _place(connection, "event", name)
                found = await queries.event_at(connection, log, seq) if log else None
        return _or_404(found, f"event {name}")

    @router.get("/requests/{name}")
    async def request(name: str) -> dict[str, Any]:
        """A request's row and its events in order."""
        async with pool.acquire() as connection:
            return _or_404(await queries.request(connection, name), f"request {name}")

    @router.get("/state")
    async def state() -> dict[str, Any]:
        """Nodes, workers, epochs and parameters as of the checkpoint."""
        async with pool.acquire() as connection:
            return await queries.state(connection)

    @router.get("/windows")
    async def windows(limit: Annotated[int, Query(ge=1, le=queries.WINDOWS_MAX)] = 100) -> dict[str, Any]:
        """The newest observation windows, newest first."""
        async with pool.acquire() as connection:
            return {"windows": await queries.windows(connection, limit)}

    return router


async def _place(connection: Any, field: str, text: str) -> tuple[UUID | None, int]:
    """`SEQ` or `LOG:SEQ`; the log is None in an empty record."""
    log_text, colon, seq_text = text.rpartition(":")
    log = _uuid(log_text) if colon else await queries.newest_log(connection)
    if not (seq_text.isascii() and seq_text.isdigit() and int(seq_text) <= BIGINT_MAX) or (colon and log is None):
        raise HTTPException(422, f"{field}: {text!r} is neither SEQ nor LOG:SEQ (a UUID and a number below 2^63)")
    return log, int(seq_text)


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _or_404(found: dict[str, Any] | None, what: str) -> dict[str, Any]:
    if found is None:
        raise HTTPException(404, f"{what} is not in the record")
    return found
