"""All hooks, by the place they are put in. The same in every process of a server: each runs where its process gets to
it."""

import sglang.version
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from services.worker.engine.sglang.plugin import fitness


def install() -> None:
    """`SystemExit` with everything that does not fit."""
    missing = fitness.missing(sglang.version.__version__)
    if missing:
        raise SystemExit("vertumnus: this SGLang cannot change its geometry:\n  " + "\n  ".join(missing))
    # These reach into what was just checked.
    from services.worker.engine.sglang.plugin import controller, models, store
    from services.worker.engine.sglang.plugin.launch import Launch
    from services.worker.engine.sglang.plugin.mailbox import Mailbox
    from services.worker.engine.sglang.plugin.rebinding import Groups
    from services.worker.engine.sglang.plugin.receiving import Receiving
    from services.worker.engine.sglang.plugin.transfers import choose_sender
    from services.worker.engine.sglang.plugin.unit import Unit

    groups, mailbox = Groups(), Mailbox()
    unit, receiving = Unit(groups, mailbox, store.connect), Receiving(mailbox)
    around, register = HookType.AROUND, HookRegistry.register
    register("sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes", Launch().begin, HookType.BEFORE)
    parts = "sglang.srt.managers.scheduler_components."
    models.install(register, around, groups)
    controller.install(register, around, store.connect)
    register("sglang.srt.distributed.parallel_state.initialize_model_parallel", groups.create, HookType.AFTER)
    register(parts + "request_receiver.SchedulerRequestReceiver._pull_raw_reqs", receiving.pull, around)
    register(parts + "idle_sleeper.IdleSleeper.maybe_sleep", receiving.sleep, around)
    register(parts + "dp_attn.SchedulerDPAttnAdapter.prepare_mlp_sync_batch", unit.sync, around)
    register("sglang.srt.managers.scheduler.Scheduler.set_internal_state", unit.verb, around)
    register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", unit.state, around)
    register("sglang.srt.managers.scheduler.Scheduler.run_batch", unit.step, around)
    register("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.insert", unit.inserted, around)
    register("sglang.srt.disaggregation.common.conn.CommonKVSender.__init__", choose_sender, around)
