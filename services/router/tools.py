"""Tools as OpenAI's chat has them. They reach the model through its chat template, and what it calls is in the text of its
answer: nothing here reads calls out of it, and no grammar is enforced."""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TOOLS_MAX = 128
NAME_CHARS_MAX = 64


class Function(BaseModel):
    """A function that a model may call. `parameters` is a JSON schema, handed to the template as it is."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=NAME_CHARS_MAX)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(default=None, description="taken, of no effect: no grammar is enforced")


class Tool(BaseModel):
    """One of a request's tools."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: Function


class CalledFunction(BaseModel):
    """What an assistant called, and with what, as JSON in a text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=NAME_CHARS_MAX)
    arguments: str


class ToolCall(BaseModel):
    """One call in an assistant's turn."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str = Field(min_length=1, max_length=128)
    type: Literal["function"] = "function"
    function: CalledFunction


def arguments(given: str) -> Any:
    """Those of a call, if they are JSON that can be read; what a model made up need not be."""
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return given
