"""One request of a step as SGLang's `/generate` takes it, and what its answers say (0.5.23). Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from services.worker.engine.protocol import EngineError, PrefillItem, Sampling, Token
from services.worker.engine.sglang.page_hashes import salt_of

ROOMS = 2**62
"""Bootstrap rooms are drawn below this: SGLang takes numbers up to 2^63, and a room is rounded to its rank."""


class Pairing(NamedTuple):
    """Where a decode server meets the prefill: the prefill server's bootstrap address, and a number that is theirs alone."""

    host: str
    port: int
    room: int


class Part(NamedTuple):
    """What one answer, whole or part of a stream, adds. `finish` is SGLang's reason and `detail` its message when it is the
    last. `began_s` and `ended_s` are the server's wall clock around the prefill, None if it does not measure
    (`--enable-metrics`)."""

    tokens: tuple[Token, ...]
    cached_tokens: int
    finish: str | None
    detail: str
    began_s: float | None
    ended_s: float | None


def body(item: PrefillItem, rid: str, unit: int | None, pairing: Pairing | None) -> dict[str, Any]:
    """The JSON of `/generate`. `unit` is the rank of the server that leads the worker, None if the server has one cache only.

    A share that does not end the prompt is a prompt of its own whose token nobody wants.
    """
    sampling, then = item.sampling, item.then if item.until is None else None
    asked: dict[str, Any] = {
        "rid": rid,
        "input_ids": item.tokens[: item.until].tolist(),
        "stream": then is not None,
        "cache_salt": salt_of(item.request, item.chain),
        "sampling_params": {
            "max_new_tokens": then.new_tokens_max if then else 1,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "sampling_seed": _seed(sampling.seed),
            # `ignore_eos` ignores stop tokens with it; without, SGLang also stops at the model's own end tokens.
            "stop_token_ids": sorted(then.stop_tokens) if then else [],
            "ignore_eos": not (then and then.stop_tokens),
            "no_stop_trim": True,
        },
    }
    if item.until is None:
        asked["sampling_params"] |= _fields(sampling, asked["sampling_params"]["max_new_tokens"])
    if sampling.logprobs:
        # One more than others are wanted, as the chosen token is among them unless chance has taken a less likely one.
        asked |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs + 1}
    if unit is not None:
        asked["routed_dp_rank"] = unit
    if pairing is not None:
        asked |= {"bootstrap_host": pairing.host, "bootstrap_port": pairing.port, "bootstrap_room": pairing.room}
    return asked


def _fields(sampling: Sampling, new_tokens_max: int) -> dict[str, Any]:
    """Those that differ from what SGLang does without them. Its `repetition_penalty` counts what was generated alone."""
    fields: dict[str, tuple[Any, Any]] = {
        "top_k": (sampling.top_k, 0),
        "min_p": (sampling.min_p, 0),
        "presence_penalty": (sampling.presence_penalty, 0),
        "frequency_penalty": (sampling.frequency_penalty, 0),
        "repetition_penalty": (sampling.repetition_penalty, 1),
        "logit_bias": ({str(token): bias for token, bias in sampling.logit_bias}, {}),
        "min_new_tokens": (min(sampling.min_tokens, new_tokens_max), 0),
        "json_schema": (sampling.json_schema, None),
    }
    return {name: value for name, (value, neutral) in fields.items() if value != neutral}


def room_for(drawn: int, unit: int | None, units: int) -> int:
    """A room that SGLang's own rule, room modulo ranks, sends to this unit."""
    return drawn if unit is None else drawn - drawn % units + unit


def _seed(seed: int) -> int:
    """Any integer, as the 64 bits that SGLang takes."""
    return (seed + 2**63) % 2**64 - 2**63


class Answers:
    """The answers to one request, in order. `incremental` if each part of a stream brings new tokens alone (the server's
    `--incremental-streaming-output`); else each repeats all."""

    def __init__(self, incremental: bool) -> None:
        self._incremental = incremental
        self._seen = 0

    def read(self, answer: Mapping[str, Any]) -> Part:
        """Errors: EngineError if SGLang answers what this version would not."""
        try:
            meta = answer["meta_info"]
            start = 0 if self._incremental else self._seen
            tokens = tuple(_tokens(answer["output_ids"], meta, start))
            self._seen += len(tokens)
            reason = meta["finish_reason"] or {}
            return Part(
                tokens,
                meta["cached_tokens"],
                reason.get("type"),
                str(reason.get("message") or ""),
                meta.get("forward_entry_time"),
                meta.get("prefill_finished_time"),
            )
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise EngineError(f"not an answer of SGLang 0.5.23: {type(error).__name__}: {error}") from None


def _tokens(output_ids: list[int], meta: Mapping[str, Any], start: int) -> Iterator[Token]:
    chosen, others = meta.get("output_token_logprobs"), meta.get("output_top_logprobs")
    for index in range(start, len(output_ids)):
        if chosen is None or others is None:
            yield Token(output_ids[index])
        else:
            first = output_ids[index]
            alternatives = [(int(token), float(value)) for value, token, *_ in others[index] or ()]
            likely = [each for each in alternatives if each[0] != first]
            yield Token(first, ((first, float(chosen[index][0])), *likely[: max(0, len(alternatives) - 1)]))
