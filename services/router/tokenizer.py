"""Text to token ids and back, as a Hugging Face model directory says: `tokenizer.json`, the chat template, the stop tokens.

Encoding runs in a bounded pool of threads. `encode_batch_fast` is called for single texts too: it lets the event loop run
meanwhile, which `encode` does not (measured: 10 s without a turn for 3.6 million tokens).
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jinja2
import numpy as np
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders

from services.router.text import DecodedStream
from shared.model.blocks import Tokens

CHARS_PER_TOKEN_MAX = 16
"""Text of more characters than this for each token of the limit is refused unread. Prose has 4 or 5; only long runs of blanks
and the like have more than 8. Measured: 7 MB of short words take a gigabyte of memory and 10 s to become 3.7 million tokens."""

CONTEXT_TOKENS = 8
"""How much of a prompt's end a decoder sees in front of an answer: tokenizers look back one word at most."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""How vocabularies without a token for every byte sequence write single bytes (SentencePiece's byte fallback)."""


def _bytes_of_letters() -> dict[str, int]:
    """Byte-level vocabularies (GPT-2's and all after it) write each byte as one printable letter: itself if it is one in
    Latin-1, else the next code point from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF_LETTER = _bytes_of_letters()

T = TypeVar("T")


class BadModelDirectory(Exception):
    """The directory cannot be served from; the message names the file."""


class TemplateRefused(ValueError):
    """The model's chat template does not take these messages; the message is the template's own."""


class PromptTooLong(ValueError):
    """The prompt has more tokens than can be served, or so much text that it must have; the message counts them."""

    def __init__(self, count: int, what: str, limit: int) -> None:
        super().__init__(f"the prompt has {count} {what}; at most {limit} can be served")


class ModelText:
    """One model's tokenizer and template. Its methods take processor time: call them through `TextThreads`."""

    def __init__(self, directory: Path) -> None:
        """Errors: BadModelDirectory."""
        try:
            self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise BadModelDirectory(f"{directory / 'tokenizer.json'}: {error}") from error
        config = _json(directory / "config.json")
        settings = _json(directory / "tokenizer_config.json")
        generation = _json(directory / "generation_config.json", needed=False)
        try:
            self._read(directory, config, settings, generation)
        except (LookupError, TypeError, ValueError) as error:
            raise BadModelDirectory(f"{directory}: not as Hugging Face writes it: {error!r}") from error

    def _read(
        self, directory: Path, config: dict[str, Any], settings: dict[str, Any], generation: dict[str, Any]
    ) -> None:
        self.vocabulary = int(config["vocab_size"])
        self.stop_tokens = _stop_tokens(generation.get("eos_token_id", config.get("eos_token_id")))
        self._byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._special = {
            name: text for name in ("bos_token", "eos_token") if (text := _token_text(settings.get(name))) is not None
        }
        source = _template_source(directory, settings)
        self._template = _template(directory, source)
        self._knows_tools = source is not None and "tools" in meta.find_undeclared_variables(ENVIRONMENT.parse(source))

    @property
    def has_chat(self) -> bool:
        return self._template is not None

    @property
    def has_tools(self) -> bool:
        """Whether the template tells the model of tools."""
        return self._knows_tools

    def encode(self, text: str, tokens_max: int) -> Tokens:
        """The text as a prompt of its own, with the model's begin token if it has one. Errors: PromptTooLong."""
        return self._encode(text, tokens_max, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tokens_max: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Tokens:
        """The conversation up to where the assistant speaks. Errors: TemplateRefused, PromptTooLong."""
        assert self._template is not None, "asked only if the model has a chat template"
        try:
            text = self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=True, **self._special
            )
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
            # Templates take the arguments of calls apart, and fail on others than they expect in Python's own ways.
            raise TemplateRefused(str(error)) from error
        return self._encode(text, tokens_max, add_special_tokens=False)

    def stream(self, prompt: Tokens) -> DecodedStream:
        """The text of an answer to `prompt`."""
        return DecodedStream(self._decode, prompt[-CONTEXT_TOKENS:].tolist())

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, special ones included: of a character that several tokens share, its own bytes."""
        name = self._tokenizer.id_to_token(token) or ""
        if self._byte_level and BYTE_OF_LETTER.keys() >= set(name):
            return bytes(BYTE_OF_LETTER[letter] for letter in name)
        if (byte := BYTE_TOKEN.fullmatch(name)) is not None:
            return bytes([int(byte[1], 16)])
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()

    def _encode(self, text: str, tokens_max: int, *, add_special_tokens: bool) -> Tokens:
        if len(text) > CHARS_PER_TOKEN_MAX * tokens_max:
            raise PromptTooLong(len(text), "characters", CHARS_PER_TOKEN_MAX * tokens_max)
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if len(encoding) > tokens_max:
            raise PromptTooLong(len(encoding), "tokens", tokens_max)
        return np.asarray(encoding.ids, dtype=np.uint32)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


class TextThreads:
    """A bounded pool. What waits for it is bounded by the number of open requests."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="text")

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """`work(*args)` beside the event loop; raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args))

    def close(self) -> None:
        """Wait for nothing."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _json(path: Path, *, needed: bool = True) -> dict[str, Any]:
    if not needed and not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadModelDirectory(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise BadModelDirectory(f"{path}: an object is needed")
    return content


def _stop_tokens(ids: object) -> tuple[int, ...]:
    match ids:
        case int():
            return (ids,)
        case list():
            return tuple(int(each) for each in ids)
        case _:
            return ()


def _token_text(token: object) -> str | None:
    """Old configurations write a token as an object with its text in `content`."""
    match token:
        case str():
            return token
        case {"content": str(text)}:
            return text
        case _:
            return None


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    source = settings.get("chat_template")
    file = directory / "chat_template.jinja"
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    if isinstance(source, list):
        source = next((each["template"] for each in source if each["name"] == "default"), None)
    return source


def _template(directory: Path, source: str | None) -> jinja2.Template | None:
    if source is None:
        return None
    try:
        return ENVIRONMENT.from_string(source)
    except jinja2.TemplateError as error:
        raise BadModelDirectory(f"{directory}: chat template: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _environment() -> ImmutableSandboxedEnvironment:
    """A template is part of a downloaded model: it must not reach Python, and it gets trimmed as its authors tested it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    return environment


ENVIRONMENT = _environment()
