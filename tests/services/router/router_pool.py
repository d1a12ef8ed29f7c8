"""A pool of real processes for the router's tests: controller, modelled worker, router, on a real NATS server."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cli.embedded.nats import EmbeddedNats
from tests.support.replica import Replica
from tests.support.tiny_models import write_tiny_model

MODEL = "modelled"
VOCABULARY = 2_000
CONTEXT = 4_096
BLOCK_TOKENS = 16
START_S_MAX = 40.0


def write_model_dir(directory: Path) -> Path:
    """A byte-level tokenizer with a chat template, whose ids up to `VOCABULARY` are words: ` w1000 `, …"""
    write_tiny_model(directory, "llama")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([f" w{token}" for token in range(tokenizer.get_vocab_size(), VOCABULARY)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY}))
    return directory


class RouterPool:
    """Modelled time runs `speedup` times as fast. The workers' 8 ranks are composed as 1,1,2,4."""

    def __init__(
        self,
        nats: EmbeddedNats,
        directory: Path,
        *,
        model_dir: Path | None = None,
        speedup: float = 100,
        nodes: int = 1,
        worker: dict[str, str] | None = None,
        router: dict[str, str] | None = None,
    ) -> None:
        self.nats = nats
        directory.mkdir(parents=True, exist_ok=True)
        key = directory / "block.key"
        key.write_bytes(os.urandom(32))
        pace = {"VERTUMNUS_SPEEDUP": str(speedup)}
        modelled = {
            **pace,
            "VERTUMNUS_ENGINE": "modelled",
            "VERTUMNUS_NODES": str(nodes),
            "VERTUMNUS_BLOCK_TOKENS": str(BLOCK_TOKENS),
            "VERTUMNUS_CONTEXT_TOKENS_MAX": str(CONTEXT),
            "VERTUMNUS_MODELLED_VOCABULARY": str(VOCABULARY),
        }
        text = {"VERTUMNUS_MODEL_DIR": str(model_dir)} if model_dir else {}
        self._modelled = modelled
        front = {**pace, **text, "VERTUMNUS_BLOCK_KEY_FILE": str(key)}
        self.controller = Replica("controller", nats, directory, VERTUMNUS_COMPOSITION="1,1,2,4")
        self.worker = Replica("worker", nats, directory, **{**modelled, **(worker or {})})
        self.router = Replica("router", nats, directory, **{**front, **(router or {})})

    @property
    def api(self) -> str:
        """The base address for an OpenAI client."""
        return f"{self.router.url}/v1"

    def another_worker(self, nats: EmbeddedNats, directory: Path, node: str) -> Replica:
        """A second worker process, for node `node`. Not started."""
        return Replica("worker", nats, directory, node, **self._modelled, VERTUMNUS_NODE=node)

    def start(self) -> None:
        """Returns when a request would be served."""
        for each in (self.controller, self.worker, self.router):
            each.start()
        deadline = time.monotonic() + START_S_MAX
        while not self.router.ready():
            for each in (self.controller, self.worker, self.router):
                assert each.exit_status() is None, each.log.read_text()[-3_000:]
            assert time.monotonic() < deadline, self.router.log.read_text()[-3_000:]
            time.sleep(0.05)

    def stop(self) -> None:
        for each in (self.router, self.worker, self.controller):
            each.stop(kill=True)


@contextmanager
def pool_at_work(tmp_path: Path, **settings: Any) -> Iterator[RouterPool]:
    """A started pool of its own, `RouterPool`'s settings, on a NATS server of its own."""
    with EmbeddedNats(tmp_path / "nats", sync_always=False) as nats:
        made = RouterPool(nats, tmp_path / "pool", **settings)
        try:
            made.start()
            yield made
        finally:
            made.stop()
