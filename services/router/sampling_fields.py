"""How a client wants its tokens chosen: OpenAI's fields, and those that vLLM and SGLang have beside them under the same names.

What each of them does to the model's logits is said in `services/worker/engine/torch/penalties.py`.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from shared.contracts.commands import JSON_SCHEMA_CHARS_MAX, LOGIT_BIAS_MAX, SamplingSpec

STOPS_MAX = 4
STOP_CHARS_MAX = 256
"""Bounds how much of an answer is held back in search of a stop string."""

STOP_TOKEN_IDS_MAX = 64
"""With the model's own they stay under the limit of a command, of 256."""

BIAS_MAX = 100
TOKEN_ID_MAX = 2**32 - 1
OUTPUT_TOKENS_MAX = 2**31 - 1
"""Any number beyond is nobody's wish; the router's own limit is far lower and named where the prompt is known."""

TokenId = Annotated[int, Field(ge=0, le=TOKEN_ID_MAX)]


def _stops(given: Any) -> Any:
    if given is None:
        return []
    return [given] if isinstance(given, str) else given


def _biases(given: Any) -> Any:
    """By token id, which JSON can only write as a text."""
    if not isinstance(given, dict):
        return {} if given is None else given
    if len(given) > LOGIT_BIAS_MAX:
        raise ValueError(f"at most {LOGIT_BIAS_MAX} tokens can have one, got {len(given)}")
    biases: dict[int, float] = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10 and int(token) <= TOKEN_ID_MAX):
            raise ValueError("keys are token ids, written as decimal numbers")
        if type(bias) not in (int, float) or not -BIAS_MAX <= bias <= BIAS_MAX:
            raise ValueError(f"a bias is a number from {-BIAS_MAX} to {BIAS_MAX}; that of token {int(token)} is not")
        biases[int(token)] = bias
    return biases


class JsonSchema(BaseModel):
    """The schema that an answer is to meet. `strict` has no effect: it always is."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(default="schema", min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """`text` binds nothing, `json_object` any JSON object, `json_schema` one that meets the schema."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> Self:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError('json_schema: with type "json_schema" there is one, and with no other')
        if (schema := self.schema_text) is not None and len(schema) > JSON_SCHEMA_CHARS_MAX:
            raise ValueError(f"json_schema: {len(schema)} characters; a schema has at most {JSON_SCHEMA_CHARS_MAX}")
        return self

    @property
    def schema_text(self) -> str | None:
        """As SGLang takes it. Errors: ValueError for numbers that JSON has not."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return '{"type": "object"}'
            case "json_schema":
                assert self.json_schema is not None, "the type was checked"
                return json.dumps(self.json_schema.schema_, allow_nan=False)


class SamplingFields(BaseModel):
    """What both endpoints take, all of it optional."""

    model_config = ConfigDict(extra="forbid", strict=True)

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1, description="extension: -1 and 0 for all tokens")
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="extension: of the most likely token's probability"
    )
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=2, description="extension: 1 for none")
    logit_bias: Annotated[dict[TokenId, float], BeforeValidator(_biases)] = Field(default_factory=dict)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]],
        BeforeValidator(_stops),
        Field(max_length=STOPS_MAX),
    ] = Field(default_factory=list)
    include_stop_str_in_output: bool = Field(default=False, description="extension: the answer shows its stop string")
    stop_token_ids: list[TokenId] | None = Field(
        default=None, max_length=STOP_TOKEN_IDS_MAX, description="extension: besides the model's own"
    )
    min_tokens: int | None = Field(
        default=None, ge=0, le=OUTPUT_TOKENS_MAX, description="extension: before them nothing stops the answer"
    )
    ignore_eos: bool = Field(default=False, description="extension: generate max_tokens whatever the model says")
    response_format: ResponseFormat | None = None

    @property
    def json_schema(self) -> str | None:
        """What binds the answer."""
        return None if self.response_format is None else self.response_format.schema_text

    def spec(self, seed: int, alternatives: int | None) -> SamplingSpec:
        """As engines are told. `seed` is taken where the client has none."""
        return SamplingSpec(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=seed if self.seed is None else self.seed,
            logprobs=0 if alternatives is None else max(1, alternatives),
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens or 0,
            json_schema=self.json_schema,
        )
