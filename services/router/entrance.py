"""What every handler of `/v1` begins and ends with: who asks, for which model, and failures in OpenAI's form."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import orjson
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from services.router import errors, headers
from services.router.bodies import Bodies
from services.router.calls import NotReceived, Unserved
from services.router.dispatch import Dispatcher
from services.router.keys import DEFAULT
from services.router.offers import Offer, offered
from services.router.openai import BadRequest, as_sent
from services.router.placements import Placements
from services.router.prompts import Context, Prompts
from services.router.refusals import Refusals
from services.router.settings import RouterSettings
from shared.contracts.ids import RequestId, TenantId
from shared.runtime.clock import Clock, Ids


class Parts(NamedTuple):
    """What the API stands on."""

    settings: RouterSettings
    dispatcher: Dispatcher
    placements: Placements
    prompts: Prompts
    refusals: Refusals
    clock: Clock
    ids: Ids


class Entrance:
    """One per process: the limits on bodies are for all handlers together."""

    def __init__(self, parts: Parts) -> None:
        self.bodies = Bodies(parts.settings.body_bytes_max)
        self._dispatcher = parts.dispatcher
        self._refusals = parts.refusals
        self._clock = parts.clock
        self._keys = parts.settings.api_keys()

    async def guarded(self, request: Request, handle: Callable[[Context], Awaitable[Response]]) -> Response:
        """Refusals and failures as responses; refusals are counted."""
        told = {"x-request-id": request.state.request_id}
        tenant = DEFAULT
        try:
            tenant = headers.tenant(request, self._keys)
            return await handle(self._context(request, tenant))
        except BadRequest as bad:
            self._refusals.count(tenant, errors.refusal_reason(bad))
            return errors.of_bad_request(bad).response(told)
        except NotReceived as refused:
            self._refusals.count(tenant, errors.refusal_reason(refused))
            return errors.of_unserved(refused).response(told)
        except Unserved as unserved:
            return errors.of_unserved(unserved).response(told)
        except ClientDisconnect:
            return Response(status_code=499)

    def offer(self) -> Offer | None:
        """What the pool serves."""
        return offered(self._dispatcher.state)

    def offer_of(self, model: str | None) -> Offer:
        """What is served under this name; None takes the pool's one model. Errors: BadRequest (404) for another model;
        NotReceived while no node has ever been seen."""
        offer = self.offer()
        if offer is None:
            raise NotReceived("no-worker", "no node has registered yet", 1)
        if model is not None and offer.model != model:
            raise unknown_model(model)
        return offer

    def _context(self, request: Request, tenant: TenantId) -> Context:
        """What the headers say. Errors: BadRequest."""
        return Context(
            request=RequestId(request.state.recorded),
            tenant=tenant,
            arrived_ns=self._clock.monotonic_ns(),
            slo_us=headers.slo_us(request),
            traceparent=headers.traceparent(request),
            client_digest=request.state.client_digest,
            hard_slo=headers.hard_slo(request),
            priority=headers.priority(request),
        )


def unknown_model(name: str) -> BadRequest:
    return BadRequest(f"the model {as_sent(name)} is not served here", "model", "model_not_found", status=404)


def json_response(
    content: dict[str, Any], request: Request, more: Mapping[str, str] | None = None, status: int = 200
) -> Response:
    """An answer, with the id its request goes by."""
    told = {**(more or {}), "x-request-id": request.state.request_id}
    return Response(orjson.dumps(content), status, headers=told, media_type="application/json")
