"""`POST /v1/placements` over loopback beside Dynamo's selection service: a prompt in each of its forms, asked of both in turns.

Each placement is cancelled, and each reservation freed, outside the time that is told. Ours is on disk before the answer.
"""

import json
import random
import threading
import time
from base64 import b64encode
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.router.pool import chain_of, prompt
from bench.router.serving import connected, post, served
from bench.router.timing import HEADING, of
from bench.running import modelled
from cli.embedded.loopback import free_port
from shared.model.blocks import Tokens

ROUNDS = 100
CLIENTS, TOGETHER = 4, 400
WORKERS = 4
SPEEDUP = 1_000


class Asked(NamedTuple):
    """One way to ask: whom, where, and how its answer is taken back."""

    url: str
    path: str
    body: bytes
    kind: str = "json"

    def once(self, connection: Any, number: int) -> int:
        """Nanoseconds until the answer."""
        body = self.body.replace(b"NUMBER", b"%d" % number)
        began = time.perf_counter_ns()
        status, content = post(connection, self.path, body, self.kind)
        taken = time.perf_counter_ns() - began
        if status >= 300:
            raise SystemExit(f"{self.path}: {status} {content[:300]!r}")
        told = json.loads(content)
        if "selection_id" in told:
            connection.request("DELETE", f"/reservations/{told['selection_id']}")
            connection.getresponse().read()
        else:
            post(connection, f"/v1/placements/{told['id']}/cancelled", b"")
        return taken


def placements(peers: Path | None, prompt_tokens: int) -> None:
    """`peers`: an environment's folder that has Dynamo's service; None measures ours alone."""
    tokens = prompt(random.Random(5), prompt_tokens) % 1_000
    for block_tokens in (64, 512):
        with ExitStack() as stack:
            system = stack.enter_context(modelled(SPEEDUP, VERTUMNUS_BLOCK_TOKENS=str(block_tokens)))
            forms = _ours(system.told["api_url"].removesuffix("/v1"), tokens, block_tokens)
            if peers is not None:
                command = [str(peers / "bin/python"), "-m", "dynamo.select_service", "--threads", "1", "--port"]
                url, _ = stack.enter_context(served(command, partial(_has_workers, block_tokens)))
                forms |= _dynamos(url, tokens, block_tokens)
            print(f"\nplacements of {prompt_tokens} tokens, blocks of {block_tokens}\n{HEADING}")
            _one_at_a_time(forms)
            for name, asked in forms.items():
                print(f"{name:40} {_together(asked):8.0f} requests/s by {CLIENTS} clients, each taken back at once")


def _ours(url: str, tokens: Tokens, block_tokens: int) -> dict[str, Asked]:
    packed = b64encode(b"".join(chain_of(tokens, block_tokens))).decode()
    whole = {"model": "modelled", "prompt": tokens.tolist(), "max_tokens": 1}
    bodies = {
        "token ids, JSON": (json.dumps(whole).encode(), "json"),
        "token ids, u32": (tokens.tobytes(), "octet-stream"),
        "block ids, base64": (json.dumps({"block_ids": packed, "prompt_tokens": len(tokens)}).encode(), "json"),
    }
    return {f"ours: {name}": Asked(url, "/v1/placements", *each) for name, each in bodies.items()}


def _dynamos(url: str, tokens: Tokens, block_tokens: int) -> dict[str, Asked]:
    hashes = [int.from_bytes(block[:8], "big") >> 1 for block in chain_of(tokens, block_tokens)]
    bodies = {
        "token ids, JSON": {"token_ids": tokens.tolist()},
        "hashes, JSON": {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": len(tokens)},
    }
    return {
        f"Dynamo: {name}": Asked(
            url,
            "/select_and_reserve",
            json.dumps({"model_name": "m", "selection_id": "bench-NUMBER", **each}).encode(),
        )
        for name, each in bodies.items()
    }


def _has_workers(block_tokens: int, url: str) -> bool:
    """As many as our pool has, that have told of nothing they hold."""
    for worker in range(WORKERS):
        heard = {"0": f"tcp://127.0.0.1:{free_port()}"}
        told = {"worker_id": worker, "model_name": "m", "block_size": block_tokens, "endpoint": "http://127.0.0.1:9"}
        status, _ = post(connected(url), "/workers", json.dumps({**told, "kv_events_endpoints": heard}).encode())
        if status >= 300:
            return False
    return True


def _one_at_a_time(forms: Mapping[str, Asked]) -> None:
    connections = {name: connected(asked.url) for name, asked in forms.items()}
    taken: dict[str, list[int]] = {name: [] for name in forms}
    for number in range(ROUNDS):
        for name, asked in forms.items():
            taken[name].append(asked.once(connections[name], number))
    for name, each in taken.items():
        print(f"{name:40} {of(each)}")


def _together(asked: Asked) -> float:
    """Requests per second."""

    def client(first: int) -> None:
        connection = connected(asked.url)
        for number in range(first, TOGETHER, CLIENTS):
            asked.once(connection, 1_000 + number)

    threads = [threading.Thread(target=client, args=(first,)) for first in range(CLIENTS)]
    began = time.perf_counter()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return TOGETHER / (time.perf_counter() - began)
