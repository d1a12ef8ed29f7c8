"""What `vertumnus doctor --sglang` looks at: the servers that a worker with the same environment would join."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cli.checks import Check
from cli.terminal import reason
from services.worker.engine.protocol import EngineError
from services.worker.engine.sglang.facts import Facts, decode_refusals, refusals
from services.worker.engine.sglang.model_facts import read_model
from services.worker.engine.sglang.plugin.fitness import VERSION
from services.worker.engine.sglang.server import Server
from services.worker.engine.sglang.settings import SglangSettings
from services.worker.settings import WorkerSettings

NEEDED = f"SGLang {VERSION} that serves the pool's model, in its blocks, and publishes KV events"


def sglang_checks(model: Path | None) -> list[Check]:
    """One for each server that `VERTUMNUS_SGLANG_*` name, or one that says what is wrong with the settings. `model` is the
    directory of what they serve, if VERTUMNUS_MODEL_DIR does not name it."""
    named: dict[str, Any] = {} if model is None else {"model_dir": model}
    try:
        settings = WorkerSettings(engine="sglang", **named).sglang()
    except ValidationError as error:
        return [Check("SGLang", False, reason(error), "VERTUMNUS_SGLANG_SERVERS and what goes with it")]
    urls = [*(each.url for each in settings.servers), *(each.url for each in settings.decode)]
    try:
        return list(judge(settings, asyncio.run(_ask(urls, settings.key))))
    except EngineError as error:
        return [Check("SGLang", False, str(error), "the directory of the model that the servers serve")]


async def _ask(urls: Sequence[str], key: str | None) -> list[Facts | str]:
    """What each server says of itself, or why it says nothing."""
    found: list[Facts | str] = []
    for server in [Server(url, key) for url in urls]:
        try:
            found.append(await server.join())
        except EngineError as error:
            found.append(str(error))
        finally:
            await server.close()
    return found


def judge(settings: SglangSettings, told: Sequence[Facts | str]) -> Iterator[Check]:
    """What to make of each server's answer: prefill servers first, in the order of the settings. EngineError if the model
    cannot be read."""
    model = read_model(settings.model_dir)
    for number, facts in enumerate(told):
        prefill = number < len(settings.servers)
        url = settings.servers[number].url if prefill else settings.decode[number - len(settings.servers)].url
        name = "SGLang prefill" if prefill else "SGLang decode"
        if isinstance(facts, str):
            yield Check(name, False, facts, NEEDED)
            continue
        found = (
            refusals(facts, settings.servers[number], settings, model)
            if prefill
            else decode_refusals(facts, url, settings, model)
        )
        capacity = f"{facts.max_total_num_tokens // facts.page_size} blocks of {facts.page_size} tokens"
        yield Check(name, not found, "; ".join(found) or f"{url}: {facts.version}, {capacity}", NEEDED)
