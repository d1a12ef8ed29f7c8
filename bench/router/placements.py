"""`POST /v1/placements` of a running router, over loopback: a 64K-token prompt in each of its forms, one at a time."""

import json
import random
import time
from base64 import b64encode
from http.client import HTTPConnection
from urllib.parse import urlsplit

from bench.router.pool import chain_of, prompt
from bench.router.timing import HEADING, of

ROUNDS = 200


def placements(url: str, prompt_tokens: int) -> None:
    """Each placement is cancelled at once, outside the time that is told."""
    connection = HTTPConnection(urlsplit(url).netloc)

    def post(path: str, body: bytes, kind: str) -> dict[str, object]:
        connection.request("POST", path, body, {"content-type": kind})
        answer = connection.getresponse()
        content = json.loads(answer.read())
        if answer.status >= 300:
            raise SystemExit(f"{path}: {answer.status} {content['error']['message']}")
        return dict(content)

    connection.request("GET", "/v1/models")
    [model] = json.loads(connection.getresponse().read())["data"]
    tokens = prompt(random.Random(5), prompt_tokens) % 1_000
    forms = {
        "token ids, JSON": (
            json.dumps({"model": model["id"], "prompt": tokens.tolist(), "max_tokens": 1}).encode(),
            "json",
        ),
        "token ids, u32": (tokens.tobytes(), "octet-stream"),
    }
    for block_tokens in (64, 512):
        packed = b64encode(b"".join(chain_of(tokens, block_tokens))).decode()
        body = json.dumps({"block_ids": packed, "prompt_tokens": prompt_tokens}).encode()
        forms[f"block ids of {block_tokens}, base64"] = body, "json"
    print(f"\n/v1/placements, {prompt_tokens} tokens\n{HEADING}")
    for name, (body, kind) in forms.items():
        taken = []
        for _ in range(ROUNDS):
            began = time.perf_counter_ns()
            try:
                placed = post("/v1/placements", body, f"application/{kind}")
            except SystemExit as refused:
                print(f"{name:40} {refused}")
                break
            taken.append(time.perf_counter_ns() - began)
            post(f"/v1/placements/{placed['id']}/cancelled", b"", "application/json")
        else:
            print(f"{name:40} {of(taken)}")
