"""Which engine a process drives, by its settings. torch is needed where the engine is torch, SGLang nowhere."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.worker.engine.modelled import ModelledEngine, ModelledNode
from services.worker.engine.protocol import Engine
from services.worker.settings import WorkerSettings
from shared.contracts.ids import NodeId
from shared.model.cost import Coefficients, load_coefficients
from shared.runtime.clock import Clock

MakeEngine = Callable[[NodeId], Engine]
"""A new engine for each life of a node."""


def coefficients_of(settings: WorkerSettings) -> Coefficients:
    """What predicts this process's prefills, in seconds of the clock: modelled time may run fast."""
    speedup = settings.speedup if settings.engine == "modelled" else 1.0
    return load_coefficients(settings.coefficients).scaled(1 / speedup)


def settled(settings: WorkerSettings) -> WorkerSettings:
    """With the device that torch ranks are to compute on, where the settings leave it open. Errors: EngineError if it cannot
    be found out; ValueError for limits of steps that do not suit it."""
    if settings.engine != "torch" or settings.device is not None:
        return settings
    from services.worker.engine.torch.devices import visible_gpus

    found = settings.model_copy(update={"device": "cuda" if visible_gpus() else "cpu"})
    assert found.step_limits, "limits are there, or the property has said why not"
    return found


@contextmanager
def engines(settings: WorkerSettings, clock: Clock) -> Iterator[MakeEngine]:
    """What outlives a single engine is ended with the block. EngineError names what is missing or unsupported."""
    if settings.engine == "modelled":
        yield _modelled(settings, clock)
        return
    if settings.engine == "sglang":
        yield _sglang(settings, clock)
        return
    from services.worker.engine.torch.devices import gpus_for, visible_gpus
    from services.worker.engine.torch.engine import TorchEngine
    from services.worker.engine.torch.settings import TorchSettings
    from services.worker.engine.torch.zygote import Zygote

    assert settings.model_dir is not None, "the settings have checked it"
    torch_settings = TorchSettings(
        model_dir=settings.model_dir,
        prefill_ranks=settings.prefill_ranks,
        decode_ranks=settings.decode_ranks,
        sequences_per_decode_rank=settings.decode_sequences,
        block_tokens=settings.block_tokens,
        blocks_per_rank=settings.blocks,
        context_tokens_max=settings.context_tokens,
        copy_bytes_per_s=settings.copy_bytes_per_s,
        copy_checksums=settings.copy_checksums,
        gpus=gpus_for(settings.device, 0 if settings.device == "cpu" else visible_gpus()),
    )
    zygote = Zygote()
    try:
        yield lambda _node: TorchEngine(torch_settings, zygote)
    finally:
        zygote.close()


def _sglang(settings: WorkerSettings, clock: Clock) -> MakeEngine:
    from services.worker.engine.sglang.engine import SglangEngine

    asked = settings.sglang()
    return lambda _node: SglangEngine(asked, clock, random.SystemRandom())


def _modelled(settings: WorkerSettings, clock: Clock) -> MakeEngine:
    node = ModelledNode(
        model="modelled",
        model_revision="modelled",
        tokenizer_revision="modelled",
        vocabulary=settings.modelled_vocabulary,
        prefill_ranks=settings.prefill_ranks,
        decode_ranks=settings.decode_ranks,
        block_tokens=settings.block_tokens,
        blocks_per_rank=settings.blocks,
        context_tokens_max=settings.context_tokens,
        kv_bytes_per_token=settings.kv_bytes_per_token,
        coefficients=load_coefficients(settings.coefficients),
        tpot_s=settings.tpot_s,
        link_bytes_per_s=settings.link_bytes_per_s,
        speedup=settings.speedup,
        noise_sd=settings.noise_sd,
        straggler=settings.straggler,
    )
    return lambda name: ModelledEngine(node, clock, random.Random(f"{settings.seed} {name}"))
