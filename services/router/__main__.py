"""Run one router: `python -m services.router`."""

import sys

from services.router.entrance import Parts
from services.router.hosting import host
from services.router.http import build_app
from services.router.placements import Placements
from services.router.prompts import Prompts
from services.router.refusals import Refusals
from services.router.settings import RouterSettings
from services.router.tokenizer import BadModelDirectory, ModelText, TextThreads
from shared.runtime.service import open_runtime, probes, run, serve


async def main() -> None:
    settings = RouterSettings()
    text = _text(settings)
    async with open_runtime(settings, "router") as runtime:
        router = await host(settings, runtime)
        refusals = Refusals(router.outbox, runtime.clock, router.metrics)
        placements = Placements(router.dispatcher, router.outbox, settings, runtime.clock, router.metrics)
        await refusals.start()
        await placements.start()
        threads = TextThreads(settings.tokenizer_threads)
        prompts = Prompts(text, threads, settings.block_key(), settings.output_tokens_max)
        parts = Parts(settings, router.dispatcher, placements, prompts, refusals, runtime.clock, runtime.ids)
        app = build_app(parts, probes(router.dispatcher.not_ready, runtime.metrics))

        async def stop() -> None:
            placements.stop()
            await router.dispatcher.drain()
            refusals.stop()
            await router.outbox.stop()

        await serve(app, settings, router.failures, stop)


def _text(settings: RouterSettings) -> ModelText | None:
    try:
        return ModelText(settings.model_dir) if settings.model_dir else None
    except BadModelDirectory as error:
        sys.exit(f"VERTUMNUS_MODEL_DIR: {error}")


if __name__ == "__main__":
    run(main)
