"""Failures in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`. Never a stack trace, never a prompt."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson
from fastapi.responses import Response

from services.router.calls import EndReason, NotReceived, Unserved
from services.router.openai import BadRequest
from services.router.refusals import RefusalReason


class Failure(NamedTuple):
    """One error, ready to be sent."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after_s: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        match self.status:
            case 401:
                kind = "authentication_error"
            case 429:
                kind = "rate_limit_error"
            case status if status >= 500:
                kind = "server_error"
            case _:
                kind = "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, headers: Mapping[str, str]) -> Response:
        more = {"retry-after": str(self.retry_after_s)} if self.retry_after_s is not None else {}
        return Response(orjson.dumps(self.body), self.status, {**headers, **more}, "application/json")


_OF_REASON: Mapping[EndReason, tuple[int, str]] = {
    "too-long": (400, "context_length_exceeded"),
    "no-worker": (503, "no_worker"),
    "overloaded": (429, "rate_limit_exceeded"),
    "rate-limited": (429, "rate_limit_exceeded"),
    "slo": (503, "slo_unattainable"),
    "shutdown": (503, "shutting_down"),
    "attempts-exhausted": (503, "attempts_exhausted"),
    "lost-stream": (503, "timeout"),
    "client-left": (499, "client_left"),
    "internal": (500, "internal_error"),
}

_REFUSAL_OF_CODE: Mapping[str, RefusalReason] = {
    "invalid_api_key": "unauthorized",
    "model_not_found": "unknown-model",
    "request_too_large": "too-large",
    "context_length_exceeded": "too-long",
    "rate_limit_exceeded": "overloaded",
}

INTERNAL = Failure(500, "an internal error", "internal_error")


def of_bad_request(bad: BadRequest) -> Failure:
    return Failure(bad.status, str(bad), bad.code, bad.param, 1 if bad.status == 429 else None)


def of_unserved(unserved: Unserved) -> Failure:
    status, code = _OF_REASON[unserved.reason]
    return Failure(status, str(unserved), code, None, unserved.retry_after_s)


def refusal_reason(error: BadRequest | NotReceived) -> RefusalReason:
    """What the refusal is counted as."""
    if isinstance(error, BadRequest):
        return _REFUSAL_OF_CODE.get(error.code, "invalid")
    return error.reason if error.reason in ("shutdown", "no-worker", "too-long") else "overloaded"
