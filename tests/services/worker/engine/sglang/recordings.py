"""What a real SGLang 0.5.23 server answered, recorded by `record.py` with the tiny Qwen3 of `tests.support.tiny_models`."""

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from services.worker.engine.protocol import PrefillItem, Sampling
from shared.contracts.ids import RequestId
from shared.model.blocks import Tokens, block_chain

PAGE = 16


@cache
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "static.json").read_text())
    return found


def event_frames() -> list[list[bytes]]:
    """Frames of each message, in order: 83 tokens stored; 3,000 more; 3,000 that push the others out; all flushed."""
    return [[base64.b64decode(frame) for frame in frames] for frames in recorded()["events"]]


def facts_told() -> dict[str, Any]:
    return {**recorded()["model_info"], **recorded()["server_info"]}


def prompt(length: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 200, length).astype(np.uint32)


def item(name: str, length: int, seed: int = 0, **more: Any) -> PrefillItem:
    """A prompt as `record.py` sent it."""
    tokens = prompt(length, seed)
    chain = tuple(block_chain(tokens, PAGE, b"k" * 32))
    return PrefillItem(RequestId(name), tokens, chain, more.pop("sampling", Sampling()), **more)
