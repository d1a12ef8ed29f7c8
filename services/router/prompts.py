"""From a validated request to an `Order`: tokenise, check the limits that are counted in tokens, name the blocks."""

from typing import NamedTuple
from uuid import UUID

from services.router import engine_fields
from services.router.calls import Order
from services.router.offers import Offer
from services.router.openai import COMPLETION_TOKENS_DEFAULT, BadRequest, ChatRequest, CompletionRequest
from services.router.text import IdStream, TextStream
from services.router.tokenizer import ModelText, PromptTooLong, TemplateRefused, TextThreads
from shared.contracts.ids import BlockId, RequestId, TenantId
from shared.model.blocks import Tokens, block_chain, block_key

NO_TOKENIZER = "this pool has no tokenizer: send token ids as 'prompt' to /v1/completions, without 'stop'"

IDS_AT_ONCE_MAX = 8_192
"""Token ids that are hashed in the event loop: under half a millisecond."""

Asked = ChatRequest | CompletionRequest


class Context(NamedTuple):
    """What a request brings besides its body. `arrived_ns` is monotonic."""

    request: RequestId
    tenant: TenantId
    arrived_ns: int
    slo_us: int | None
    traceparent: str | None
    client_digest: str | None
    hard_slo: bool | None = None
    priority: int = 0


class Prompts:
    """`text` is None in a pool without a tokenizer: then only token ids are served, and answers are ids too."""

    def __init__(self, text: ModelText | None, threads: TextThreads, key: bytes, output_tokens_max: int) -> None:
        self._text = text
        self._threads = threads
        self._key = key
        self._output_tokens_max = output_tokens_max

    async def order(self, asked: Asked, offer: Offer, context: Context) -> Order:
        """Errors: BadRequest names the field and the limit."""
        if self._text is None and asked.stop:
            raise BadRequest(NO_TOKENIZER, "stop", "unsupported_value")
        engine_fields.check(asked, offer)
        self._check_named(asked)
        limit = offer.prompt_tokens_max
        try:
            tokens, chain = await self._tokens(asked, offer, limit, block_key(self._key, context.tenant))
        except PromptTooLong as long:
            raise too_long(str(long), _field(asked)) from None
        except TemplateRefused as refused:
            raise BadRequest(f"the model's chat template: {refused}", "messages", "invalid_value") from None
        max_tokens = self._max_tokens(asked, offer, len(tokens))
        if asked.min_tokens is not None and asked.min_tokens > max_tokens:
            message = f"invalid 'min_tokens': {asked.min_tokens} is over max_tokens, which is {max_tokens}"
            raise BadRequest(message, "min_tokens", "invalid_value")
        return Order(
            request=context.request,
            tenant=context.tenant,
            model=asked.model,
            tokens=tokens,
            chain=chain,
            max_tokens=max_tokens,
            stop_tokens=self._stop_tokens(asked),
            # Without a seed the request's own id is one: every attempt must choose alike, two requests need not.
            sampling=asked.spec(UUID(context.request).int % 2**63, asked.alternatives),
            stream=bool(asked.stream),
            arrived_ns=context.arrived_ns,
            slo_us=context.slo_us,
            traceparent=context.traceparent,
            client_digest=context.client_digest,
            hard_slo=context.hard_slo,
            priority=context.priority,
        )

    async def chain(self, tokens: Tokens, offer: Offer, tenant: TenantId) -> tuple[BlockId, ...]:
        """The blocks of a prompt that came as an array of ids. Errors: BadRequest."""
        try:
            self._check_ids(tokens, offer.prompt_tokens_max)
        except PromptTooLong as long:
            raise too_long(str(long), None) from None
        key = block_key(self._key, tenant)
        if len(tokens) <= IDS_AT_ONCE_MAX:
            return tuple(block_chain(tokens, offer.block_tokens, key))
        return tuple(await self._threads.run(block_chain, tokens, offer.block_tokens, key))

    def stream(self, order: Order) -> TextStream:
        """The text of the answer to `order`."""
        return self._text.stream(order.tokens) if self._text else IdStream()

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to an answer's text."""
        return self._text.token_bytes(token) if self._text else IdStream().push([token]).encode()

    async def _tokens(self, asked: Asked, offer: Offer, limit: int, key: bytes) -> tuple[Tokens, tuple[BlockId, ...]]:
        """Beside the event loop, unless a thread would take longer to wake up than the work does."""
        if (
            isinstance(asked, CompletionRequest)
            and not isinstance(asked.prompt, str)
            and len(asked.prompt) <= IDS_AT_ONCE_MAX
        ):
            return self._tokenise(asked, offer, limit, key)
        return await self._threads.run(self._tokenise, asked, offer, limit, key)

    def _tokenise(self, asked: Asked, offer: Offer, limit: int, key: bytes) -> tuple[Tokens, tuple[BlockId, ...]]:
        """Errors: BadRequest, PromptTooLong, TemplateRefused."""
        if isinstance(asked, CompletionRequest) and not isinstance(asked.prompt, str):
            tokens = asked.prompt
            self._check_ids(tokens, limit)
        elif self._text is None:
            raise BadRequest(
                NO_TOKENIZER, "messages" if isinstance(asked, ChatRequest) else "prompt", "unsupported_value"
            )
        elif isinstance(asked, CompletionRequest):
            assert isinstance(asked.prompt, str), "a prompt is ids or text"
            tokens = self._text.encode(asked.prompt, limit)
        elif self._text.has_chat:
            tools = asked.told_tools()
            if tools and not self._text.has_tools:
                raise BadRequest("the model's chat template knows no tools", "tools", "unsupported_value")
            tokens = self._text.encode_chat(asked.turns(), limit, tools)
        else:
            raise BadRequest("the model has no chat template: use /v1/completions", "messages", "unsupported_value")
        if not len(tokens):
            raise BadRequest("the prompt has no tokens", None, "invalid_value")
        return tokens, tuple(block_chain(tokens, offer.block_tokens, key))

    def _check_ids(self, tokens: Tokens, limit: int) -> None:
        """Errors: PromptTooLong, BadRequest."""
        if len(tokens) > limit:
            raise PromptTooLong(len(tokens), "tokens", limit)
        if self._text is not None and (highest := int(tokens.max())) >= self._text.vocabulary:
            raise BadRequest(
                f"token id {highest} is outside the vocabulary of {self._text.vocabulary}", "prompt", "invalid_value"
            )

    def _check_named(self, asked: Asked) -> None:
        """Tokens that fields name. Errors: BadRequest."""
        if self._text is None:
            return
        named = {"logit_bias": asked.logit_bias, "stop_token_ids": asked.stop_token_ids or ()}
        for field, tokens in named.items():
            if (highest := max(tokens, default=0)) >= self._text.vocabulary:
                raise BadRequest(
                    f"invalid '{field}': token id {highest} is outside the vocabulary of {self._text.vocabulary}",
                    field,
                    "invalid_value",
                )

    def _stop_tokens(self, asked: Asked) -> tuple[int, ...]:
        own = () if asked.ignore_eos or self._text is None else self._text.stop_tokens
        return tuple(dict.fromkeys((*own, *(asked.stop_token_ids or ()))))

    def _max_tokens(self, asked: Asked, offer: Offer, prompt_tokens: int) -> int:
        context = offer.context_tokens
        room = min(context - prompt_tokens, self._output_tokens_max)
        wanted = asked.output_tokens
        if wanted is None:
            return min(COMPLETION_TOKENS_DEFAULT, room) if isinstance(asked, CompletionRequest) else room
        if wanted > self._output_tokens_max:
            raise BadRequest(
                f"max_tokens: {wanted} is over the limit of {self._output_tokens_max}", "max_tokens", "invalid_value"
            )
        if wanted > room:
            raise too_long(
                f"the context has {context} tokens, but {prompt_tokens} in the prompt and {wanted} of max_tokens"
                f" are {prompt_tokens + wanted}",
                _field(asked),
            )
        return wanted


def too_long(message: str, field: str | None) -> BadRequest:
    return BadRequest(message, field, "context_length_exceeded")


def _field(asked: Asked) -> str:
    return "messages" if isinstance(asked, ChatRequest) else "prompt"
