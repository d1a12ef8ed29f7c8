"""What is done to SGLang servers without an adapter, and requests that are compared with those of another."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.adapter_servers import Running, has_ended, log_of

LIMIT_S = 300.0


def wait_logged(running: Running, text: str) -> None:
    _wait(lambda: text in log_of(running), f"{text!r} in the log")


def wait_ended(running: Running) -> None:
    _wait(lambda: has_ended(running), "the end of the server")


def _wait(holds: Any, what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {LIMIT_S:g} s for {what}"
        time.sleep(0.2)


@contextmanager
def fault(directory: Path, name: str) -> Iterator[None]:
    """A fault of `vertumnus_sglang_cpu.faults`, while the block runs."""
    (directory / name).touch()
    try:
        yield
    finally:
        (directory / name).unlink()


async def generate(
    http: httpx.AsyncClient, tokens: Sequence[int], new_tokens: int = 8, **fields: Any
) -> tuple[list[int], int]:
    """Greedy tokens after a prompt, and how many of the prompt were cached."""
    body = {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
        **fields,
    }
    answer = await http.post("/generate", json=body)
    answer.raise_for_status()
    told = answer.json()
    return told["output_ids"], told["meta_info"]["cached_tokens"]


async def generate_all(
    http: httpx.AsyncClient, prompts: Sequence[Sequence[int]], at_once: int, new_tokens: int = 8
) -> list[list[int]]:
    """Tokens after each prompt, `at_once` requests under way at a time."""
    turn = asyncio.Semaphore(at_once)

    async def one(prompt: Sequence[int]) -> list[int]:
        async with turn:
            return (await generate(http, prompt, new_tokens))[0]

    return list(await asyncio.gather(*map(one, prompts)))


def client(url: str) -> httpx.AsyncClient:
    """Patient: a server on a busy machine answers late."""
    return httpx.AsyncClient(base_url=url, timeout=900.0, limits=httpx.Limits(max_keepalive_connections=0))
