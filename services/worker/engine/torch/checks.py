"""What the torch engine says about itself, and what it refuses before any rank hears of it."""

from importlib.util import find_spec

from services.worker.engine.continuation import NO_PAST, Past
from services.worker.engine.protocol import EngineDescription, EngineError, PrefillItem, Sampling
from services.worker.engine.torch.model_config import ModelConfig, model_revision, tokenizer_revision
from services.worker.engine.torch.settings import TorchSettings
from shared.model.lattice import DEGREES

BIAS_MAX = 100.0

NIXL = "nixl_cu12"
"""What KV between nodes is read with, if it is installed (`wire`)."""


def describe(settings: TorchSettings, config: ModelConfig) -> EngineDescription:
    """The longest prompt leaves room for one new token and fits the worker with the most ranks. A worker with fewer ranks
    may have to refuse it (`OutOfBlocks`): degree × blocks_per_rank × block_tokens is its limit."""
    degrees = tuple(degree for degree in DEGREES if degree <= settings.prefill_ranks)
    context_tokens = min(settings.context_tokens_max, config.positions_max)
    lends = find_spec(NIXL) is not None
    return EngineDescription(
        engine="torch",
        model=settings.model_dir.name,
        model_revision=model_revision(settings.model_dir),
        tokenizer_revision=tokenizer_revision(settings.model_dir),
        dtype=config.dtype,
        kv_layout="cyclic",
        block_tokens=settings.block_tokens,
        prefill_ranks=settings.prefill_ranks,
        decode_ranks=settings.decode_ranks,
        degrees=degrees,
        blocks_per_rank=settings.blocks_per_rank,
        prompt_tokens_max=min(context_tokens - 1, degrees[-1] * settings.blocks_per_rank * settings.block_tokens),
        kv_bytes_per_token=config.kv_bytes_per_token,
        device="cuda" if settings.gpus else "cpu",
        decode_sequences=settings.sequences_per_decode_rank if lends and settings.decode_ranks else 0,
        lends=lends,
    )


def check_item(item: PrefillItem, limits: EngineDescription, vocab: int) -> None:
    """EngineError names the field of the item that is out of bounds."""
    prompt_tokens = len(item.tokens)
    if not 1 <= prompt_tokens <= limits.prompt_tokens_max:
        raise EngineError(f"tokens: {prompt_tokens} tokens; a prompt has 1 to {limits.prompt_tokens_max}")
    if int(item.tokens.max()) >= vocab:
        raise EngineError(f"tokens: id {int(item.tokens.max())} is outside the vocabulary of {vocab}")
    whole = prompt_tokens // limits.block_tokens
    if len(item.chain) > whole:
        raise EngineError(f"chain: {len(item.chain)} ids for {whole} whole blocks of {limits.block_tokens} tokens")
    check_sampling(item.sampling, vocab)


def check_sampling(sampling: Sampling, vocab: int, past: Past = NO_PAST) -> None:
    """EngineError names the field that is out of bounds: a rank that met it would end, and the engine with it."""
    limits = {
        "temperature": (0.0, 100.0),
        "logprobs": (0, vocab - 1),
        "top_k": (0, 2**31),
        "min_p": (0.0, 1.0),
        "presence_penalty": (-100.0, 100.0),
        "frequency_penalty": (-100.0, 100.0),
        "repetition_penalty": (0.01, 100.0),
        "min_tokens": (0, 2**31),
    }
    for name, (low, high) in limits.items():
        value = getattr(sampling, name)
        if not low <= value <= high:
            raise EngineError(f"{name}: {value} is outside [{low}, {high}]")
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"top_p: {sampling.top_p} is outside (0, 1]")
    for token, bias in sampling.logit_bias:
        if not abs(bias) <= BIAS_MAX:
            raise EngineError(f"logit_bias: {bias} of id {token} is outside [-{BIAS_MAX:g}, {BIAS_MAX:g}]")
    named = {"logit_bias": [token for token, _ in sampling.logit_bias], "stop_tokens": sampling.stops}
    for name, tokens in (named | {"past": (*past.prompt, *past.generated)}).items():
        lowest, highest = min(tokens, default=0), max(tokens, default=0)
        if lowest < 0 or highest >= vocab:
            raise EngineError(f"{name}: id {min(lowest, 0) or highest} is outside the vocabulary of {vocab}")
    if sampling.min_tokens and len(set(sampling.stops)) == vocab:
        raise EngineError(f"stop_tokens: all {vocab} of the vocabulary, and min_tokens leaves no other")
    if sampling.json_schema is not None:
        raise EngineError("json_schema: the torch engine has no grammars")
