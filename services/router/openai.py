"""What clients send, as OpenAI defines it. Strict: a field that is not served is refused by name, never ignored, and so is a
value of another type: a `true` is no number, and a `"1"` neither.

Fields that change nothing at their neutral value (`n: 1`, `echo: false`, …) are taken at that value and refused at any other,
because common clients always send them.
"""

import json
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import from_json

from services.router.sampling_fields import OUTPUT_TOKENS_MAX, SamplingFields
from services.router.tools import NAME_CHARS_MAX, TOOLS_MAX, Tool, ToolCall, arguments
from shared.model.blocks import Tokens

MESSAGES_MAX = 2_048
COMPLETION_TOKENS_DEFAULT = 16
"""`max_tokens` of a completion that names none (OpenAI's own default). A chat takes what is left of the context."""


class BadRequest(Exception):
    """The client is to blame. `code` and `param` as in OpenAI's errors."""

    def __init__(
        self, message: str, param: str | None = None, code: str = "invalid_request", *, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


SHOWN_CHARS_MAX = 128


def as_sent(value: Any) -> str:
    """A value of a request in a message about it: as JSON, which is what its sender wrote, and not the whole of a long one."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"


class Neutral(NamedTuple):
    """Takes one value, and None."""

    value: Any

    def __call__(self, given: Any) -> Any:
        is_value = given == self.value and isinstance(given, bool) == isinstance(self.value, bool)
        if given is not None and not is_value:
            raise ValueError(f"only {as_sent(self.value)} is supported, got {as_sent(given)}")
        return given


def _content(given: Any) -> Any:
    """A message's text; a list of text parts is one text."""
    if not isinstance(given, list):
        return given
    texts = []
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'content parts of type "text" are supported, got {as_sent(kind)}')
        texts.append(part["text"])
    return "".join(texts)


def _prompt(given: Any) -> str | Tokens:
    """One text or one list of token ids, alone or as a list of one."""
    if isinstance(given, list) and given and not isinstance(given[0], int):
        if len(given) > 1:
            raise ValueError(f"one prompt per request is supported, got {len(given)}")
        given = given[0]
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and (ids := _ids(given)) is not None:
        return ids
    raise ValueError("a text or a list of token ids is needed, and it may not be empty")


def _ids(given: list[Any]) -> Tokens | None:
    """None if these are no ids. In whole passes, because a long prompt has 100,000 of them."""
    try:
        ids = np.frombuffer(array("I", given), dtype=np.uint32)  # a third of the time of np.asarray
    except (TypeError, OverflowError):
        return None
    # A bool is an int to Python, and no id.
    return None if any(isinstance(given[place], bool) for place in np.flatnonzero(ids <= 1).tolist()) else ids


class Message(BaseModel):
    """One turn of a conversation. An assistant's may be calls alone; a tool's is the answer to one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    name: str | None = Field(default=None, max_length=NAME_CHARS_MAX)
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=TOOLS_MAX)
    tool_call_id: str | None = Field(default=None, max_length=128)

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("content: a text is needed, or tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: only an assistant's turn has them")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id: a tool's turn has one, and no other has")
        return self

    def turn(self) -> dict[str, Any]:
        """As a template takes it. Templates know `developer` by its old name, and want the arguments of a call as an object."""
        told = self.model_dump(exclude_none=True)
        told.setdefault("content", "")
        if self.role == "developer":
            told["role"] = "system"
        for call in told.get("tool_calls", ()):
            call["function"]["arguments"] = arguments(call["function"]["arguments"])
        return told


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk tells the usage."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = Field(default=False, description="extension: each chunk tells the usage so far")


class GenerationRequest(SamplingFields):
    """What both endpoints take."""

    model: str = Field(min_length=1, max_length=256)
    max_tokens: int | None = Field(default=None, ge=1, le=OUTPUT_TOKENS_MAX)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=1_024, description="taken, of no effect")
    return_token_ids: bool = Field(default=False, description="extension: each choice carries the ids in `token_ids`")

    n: Annotated[int | None, BeforeValidator(Neutral(1))] = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream: true")
        return self

    @property
    def output_tokens(self) -> int | None:
        """The limit the client names."""
        return self.max_tokens


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=MESSAGES_MAX)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=OUTPUT_TOKENS_MAX)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = Field(default=None, max_length=TOOLS_MAX)
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Annotated[bool | None, BeforeValidator(Neutral(True))] = None
    store: Annotated[bool | None, BeforeValidator(Neutral(False))] = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs: true")
        return self

    @property
    def output_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many alternatives per token are told; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def turns(self) -> list[dict[str, Any]]:
        """The messages as a template takes them."""
        return [each.turn() for each in self.messages]

    def told_tools(self) -> list[dict[str, Any]]:
        """The tools as a template takes them, none if the model is not to call any."""
        if self.tool_choice == "none":
            return []
        return [each.model_dump(exclude_none=True) for each in self.tools or ()]


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Annotated[str | Tokens, PlainValidator(_prompt)]
    logprobs: int | None = Field(default=None, ge=0, le=5)
    best_of: Annotated[int | None, BeforeValidator(Neutral(1))] = None
    echo: Annotated[bool | None, BeforeValidator(Neutral(False))] = None
    suffix: Annotated[str | None, BeforeValidator(Neutral(""))] = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


R = TypeVar("R", bound=BaseModel)


def read(body: bytes) -> dict[str, Any]:
    """The object in a body. Errors: BadRequest."""
    try:
        content = from_json(body)
    except ValueError as error:
        raise BadRequest(f"the body is no JSON that can be read: {error}", None, "invalid_json") from None
    if not isinstance(content, dict):
        raise BadRequest(f"the body is {as_sent(content)}, and no object", None, "invalid_value")
    return content


def parse(cls: type[R], content: dict[str, Any]) -> R:
    """The request in what a body has. BadRequest names the first wrong field; nothing of what the client sent is in the
    message but names and short values. Validating a body's bytes takes 100,000 ids three times as long."""
    try:
        return cls.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _bad_request(first["type"], first["loc"], first["msg"]) from None


def _bad_request(kind: str, loc: Sequence[int | str], message: str) -> BadRequest:
    param = _path(loc) or None
    message = message.removeprefix("Value error, ")
    match kind:
        case "extra_forbidden":
            return BadRequest(f"unsupported parameter: '{_path(loc)}'", param, "unsupported_parameter")
        case "missing":
            return BadRequest(f"missing required parameter: '{_path(loc)}'", param, "missing_required_parameter")
        case _ if param is None:
            return BadRequest(message, None, "invalid_value")
        case _:
            return BadRequest(f"invalid '{param}': {message}", param, "invalid_value")


def _path(loc: Sequence[int | str]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    path = "".join(f"[{each}]" if isinstance(each, int) else f".{each[:64]}" for each in loc)
    return path.removeprefix(".")
