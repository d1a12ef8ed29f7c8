"""Prompts and workers by what matters to a rule."""

from shared.contracts.ids import WorkerId
from simulation.baselines.rule import Prompt, WorkerView
from tests.services.router.router_world import blocks

BLOCK_TOKENS = 100


def prompt(tokens: int, salt: int = 0, *, shared: int = 0, at_s: float = 0) -> Prompt:
    """Its first `shared` blocks are those of salt 0."""
    own = blocks(tokens // BLOCK_TOKENS, salt)
    return Prompt(tokens, (*blocks(shared), *own[shared:]), BLOCK_TOKENS, round(at_s * 1e9))


def worker(
    name: str,
    degree: int = 4,
    *,
    cached: int = 0,
    queued: int = 0,
    running: int = 0,
    uncached: int = 0,
    running_blocks: int = 0,
) -> WorkerView:
    return WorkerView(WorkerId(name), degree, cached, queued, running, uncached, running_blocks, 100)
