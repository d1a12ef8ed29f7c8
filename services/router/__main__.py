"""Run one router: `python -m services.router`."""

import sys

from services.router import decider
from services.router.dispatch import Dispatcher
from services.router.doubts import end_doubts
from services.router.http import Parts, build_app
from services.router.metrics import RouterMetrics
from services.router.prompts import Prompts
from services.router.refusals import Refusals
from services.router.settings import RouterSettings
from services.router.tokenizer import BadModelDirectory, ModelText, TextThreads
from shared.runtime.outbox import Outbox
from shared.runtime.projection import Projection
from shared.runtime.service import open_runtime, probes, run, serve
from shared.runtime.telemetry import watch_log


async def main() -> None:
    settings = RouterSettings()
    text = _text(settings)
    state = decider.initial(settings.cost_model())
    async with open_runtime(settings, "router") as runtime:
        filters = [runtime.subjects.channel(each) for each in decider.HEARD]
        projection = Projection(runtime.log, filters, state, decider.evolve, runtime.keepsake)
        await projection.start()
        outbox = Outbox(projection, runtime.sealer(runtime.source), runtime.clock)
        await outbox.start()
        metrics = RouterMetrics(runtime.metrics)
        watch_log(runtime.metrics, runtime.clock, projection, outbox)
        dispatcher = Dispatcher(runtime, settings, projection, outbox, metrics)
        refusals = Refusals(outbox, runtime.clock, metrics)
        await dispatcher.start()
        await refusals.start()
        threads = TextThreads(settings.tokenizer_threads)
        prompts = Prompts(text, threads, settings.block_key(), settings.output_tokens_max)
        parts = Parts(settings, dispatcher, prompts, refusals, runtime.clock, runtime.ids)
        app = build_app(parts, probes(dispatcher.not_ready, runtime.metrics))

        async def stop() -> None:
            await dispatcher.drain()
            refusals.stop()
            await outbox.stop()

        failed = [each.failed() for each in (projection, outbox, dispatcher)]
        await serve(app, settings, [*failed, end_doubts(state, runtime)], stop)


def _text(settings: RouterSettings) -> ModelText | None:
    try:
        return ModelText(settings.model_dir) if settings.model_dir else None
    except BadModelDirectory as error:
        sys.exit(f"VERTUMNUS_MODEL_DIR: {error}")


if __name__ == "__main__":
    run(main)
