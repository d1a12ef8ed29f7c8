"""What a request says besides its body: its id, its SLO and priority, its trace, its key and tenant. All bounded, none
trusted."""

import re

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router import errors
from services.router.keys import DEFAULT, TENANT, Keys
from services.router.openai import BadRequest
from shared.contracts.ids import TenantId, client_digest
from shared.model.tenants import OTHERS, PRIORITY_MAX
from shared.runtime.clock import Ids

HEADER_BYTES_MAX = 32 * 1024
SLO_MS_MAX = 3_600_000

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestHeaders:
    """Bounds the headers, and settles the ids of a request: the record's, and the one that its response carries, which is the
    client's own if it sent a proper one."""

    def __init__(self, app: ASGIApp, ids: Ids) -> None:
        self._app = app
        self._ids = ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        given = next((value for name, value in headers if name == b"x-request-id"), b"").decode("latin-1")
        recorded = str(self._ids.next())
        is_given = bool(_REQUEST_ID.fullmatch(given))
        request_id = given if is_given else recorded
        scope.setdefault("state", {}).update(
            request_id=request_id, recorded=recorded, client_digest=client_digest(given) if is_given else None
        )
        size = sum(len(name) + len(value) for name, value in headers)
        if size > HEADER_BYTES_MAX:
            message = f"the headers have {size} bytes; at most {HEADER_BYTES_MAX} are taken"
            failure = errors.Failure(431, message, "headers_too_large")
            await failure.response({"x-request-id": request_id})(scope, receive, send)
            return
        await self._app(scope, receive, send)


def tenant(request: Request, keys: Keys) -> TenantId:
    """Whose request it is: by its key; by name, where no keys are asked or the key is a gateway's.

    Errors: BadRequest (401, 403).
    """
    owner = _owner(request, keys) if keys else OTHERS
    named = request.headers.get("x-vertumnus-tenant")
    if named is not None and not TENANT.fullmatch(named):
        message = "x-vertumnus-tenant: 1-64 letters, digits or any of '_.@-' are needed"
        raise BadRequest(message, None, "invalid_header")
    if owner == OTHERS:
        return TenantId(named or DEFAULT)
    if named not in (None, owner):
        raise BadRequest(f"x-vertumnus-tenant: the key is not {named}'s", None, "wrong_tenant", status=403)
    return owner


def _owner(request: Request, keys: Keys) -> TenantId:
    """Errors: BadRequest (401)."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    owner = keys.tenant(key.strip().encode("latin-1")) if scheme.lower() == "bearer" else None
    if owner is None:
        raise BadRequest("a known API key is needed as bearer token", None, "invalid_api_key", status=401)
    return owner


def hard_slo(request: Request) -> bool | None:
    """Whether what would be late is refused; None if the request does not say. Errors: BadRequest."""
    match request.headers.get("x-vertumnus-slo"):
        case None:
            return None
        case "hard" | "soft" as given:
            return given == "hard"
        case _:
            raise BadRequest("x-vertumnus-slo: hard or soft is needed", None, "invalid_header")


def priority(request: Request) -> int:
    """How urgent it is among its tenant's own, as far as the tenant may say so. Errors: BadRequest."""
    given = request.headers.get("x-vertumnus-priority", "0")
    if not re.fullmatch(f"[0-{PRIORITY_MAX}]", given):
        message = f"x-vertumnus-priority: a whole number from 0 to {PRIORITY_MAX} is needed"
        raise BadRequest(message, None, "invalid_header")
    return int(given)


def slo_us(request: Request) -> int | None:
    """The TTFT that this client asks for. Errors: BadRequest names the limit."""
    given = request.headers.get("x-vertumnus-ttft-slo-ms")
    if given is None:
        return None
    # By its length first: an int of thousands of digits takes long to read, or is refused by the interpreter.
    if not (
        given.isascii() and given.isdigit() and len(given) <= len(str(SLO_MS_MAX)) and 1 <= int(given) <= SLO_MS_MAX
    ):
        message = f"x-vertumnus-ttft-slo-ms: whole milliseconds from 1 to {SLO_MS_MAX} are needed"
        raise BadRequest(message, None, "invalid_header")
    return int(given) * 1_000


def traceparent(request: Request) -> str | None:
    """The client's trace; one that is malformed is as good as none (W3C Trace Context, 3.2)."""
    given = request.headers.get("traceparent", "")
    return given if _TRACEPARENT.fullmatch(given) else None
