"""The two halves of the demo: which system each starts and which requests it is sent."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import orjson

from cli.embedded.environment import TORCH_BLOCK_TOKENS, SystemChoices
from shared.model.cost import Coefficients, load_coefficients
from shared.model.lattice import Composition
from simulation.workloads.files import read
from simulation.workloads.generating import SHAPES, Phase, generated
from simulation.workloads.rows import BLOCK_TOKENS, Row
from simulation.workloads.shaping import at_speed, capped, jittered, shrunk
from simulation.workloads.statistics import statistics

SEED = 1
TRACE_ROWS = 4_000
"""Rows of a given trace that are looked at, at most."""


class Half(NamedTuple):
    """One half. Everything the system and its clients do is `speedup` times as fast as what it stands for."""

    title: str
    """What is printed above it."""
    name: str
    """Its column's name in the table."""
    directory: str
    """Its name below the data directory."""
    choices: SystemChoices
    shape: str
    """What requests are like where no trace is given, of `SHAPES`."""
    requests: int
    requests_per_s: float
    shrink: float
    prompt_tokens_max: int
    output_tokens_max: int
    concurrency: int
    """Open requests at most. A machine slower than the trace makes requests late, not lost."""
    coefficients: Coefficients
    speedup: float = 1.0
    moves: tuple[Composition, ...] = ()
    """What the first node is reconfigured to on the way, evenly spread over the requests."""

    def for_prompt(self, tokens: int) -> float:
        """The TTFT objective τ as the clients' clock sees it, seconds."""
        return self.coefficients.slo_us(tokens) / 1e6 / self.speedup

    def rows(self, trace: Path | None) -> list[Row]:
        """The requests, with arrivals in the clients' time. Errors: BadRow; OSError; ValueError if no request fits."""
        source = list(islice(_made_up(self.shape) if trace is None else read(trace), max(TRACE_ROWS, self.requests)))
        found = statistics(source)
        faster = self.requests_per_s * self.speedup / found.requests_per_s
        rows = at_speed(jittered(source, found.arrival_grid_ms, Random(SEED)), faster)
        longest = round(self.prompt_tokens_max / self.shrink)
        fitting = capped(shrunk(_fitting(rows, longest), self.shrink), self.prompt_tokens_max, self.output_tokens_max)
        chosen = list(islice(fitting, self.requests))
        if not chosen:
            raise ValueError(f"the trace: none of its first {found.requests:,} prompts has at most {longest:,} tokens")
        return chosen


def real(model_dir: Path) -> Half:
    """SmolLM2-135M on eight ranks of the torch engine. The trace is shrunk to what two CPU cores carry."""
    return Half(
        title="1. real: SmolLM2-135M, torch engine, 8 CPU ranks as 2 CP1 + 1 CP2 + 1 CP4",
        name="real, 8 CPU ranks",
        directory="real",
        choices=SystemChoices(
            "torch",
            model_dir,
            (1, 1, 2, 4),
            0,
            # Blocks as short as the trace's have become, or nothing that is shared would fill one.
            {"worker": {"block_tokens": str(TORCH_BLOCK_TOKENS)}},
        ),
        # Sessions of a conversation take minutes from turn to turn; these share within the minute that there is.
        shape="tool-agent",
        requests=64,
        requests_per_s=1.0,
        shrink=TORCH_BLOCK_TOKENS / BLOCK_TOKENS,
        prompt_tokens_max=512,
        output_tokens_max=8,
        concurrency=4,
        coefficients=load_coefficients("smollm2_135m_cpu"),
        # A split and a merge, with whatever is being served.
        moves=((1, 1, 2, 2, 2), (1, 1, 2, 4)),
    )


def scale() -> Half:
    """Forty modelled GPUs as 4CP4/3CP8, five times as fast as life: the engine is a cost model, everything else is real."""
    speedup = 5.0
    pool = {"n0": "4,4", "n1": "4,4", "n2": "8", "n3": "8", "n4": "8"}
    return Half(
        title=f"2. at scale: 40 modelled GPUs as 4 CP4 + 3 CP8, {speedup:g} × as fast as life",
        name="modelled, 40 GPUs",
        directory="scale",
        choices=SystemChoices(
            "modelled",
            None,
            (8,),
            0,
            {
                "controller": {"compositions": orjson.dumps(pool).decode()},
                "router": {"speedup": str(speedup)},
                "worker": {"speedup": str(speedup), "nodes": str(len(pool)), "block_tokens": str(BLOCK_TOKENS)},
            },
        ),
        shape="conversation",
        requests=2_000,
        requests_per_s=7.0,
        shrink=1.0,
        prompt_tokens_max=120_000,
        output_tokens_max=2,
        concurrency=512,
        coefficients=load_coefficients("qwen3_30b_a3b_h20"),
        speedup=speedup,
    )


def _made_up(shape: str) -> Iterator[Row]:
    """A trace with the lengths and the sharing of a published one, for as long as anybody reads."""
    return generated([Phase(86_400, 3.4, SHAPES[shape])], Random(SEED))


def _fitting(rows: Iterable[Row], tokens: int) -> Iterator[Row]:
    """Without the prompts that would have to be cut: a cut prompt shares more than the trace says."""
    return (row for row in rows if row.prompt_tokens <= tokens)
