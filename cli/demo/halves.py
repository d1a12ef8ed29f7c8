"""The two halves of the demo: which system each starts and which requests it is sent."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import orjson

from cli.embedded.environment import SystemChoices
from cli.trace.generating import SHAPES, Phase, generated
from cli.trace.rows import BLOCK_TOKENS, Row, read
from cli.trace.shaping import at_speed, capped, jittered, shrunk
from cli.trace.statistics import statistics
from shared.model.cost import Coefficients, load_coefficients

SEED = 1
TRACE_ROWS = 4_000
"""Rows of a given trace that are looked at, at most."""


class Half(NamedTuple):
    """One half. Everything the system and its clients do is `speedup` times as fast as what it stands for."""

    name: str
    choices: SystemChoices
    requests: int
    requests_per_s: float
    shrink: float
    prompt_tokens_max: int
    output_tokens_max: int
    concurrency: int
    """Open requests at most. A machine slower than the trace makes requests late, not lost."""
    coefficients: Coefficients
    speedup: float = 1.0

    def for_prompt(self, tokens: int) -> float:
        """The TTFT objective τ as the clients' clock sees it, seconds."""
        return self.coefficients.slo_us(tokens) / 1e6 / self.speedup

    def rows(self, trace: Path | None) -> list[Row]:
        """The requests, with arrivals in the clients' time. Errors: BadRow, OSError, ValueError for an empty trace."""
        source = list(islice(_conversation() if trace is None else read(trace), max(TRACE_ROWS, self.requests)))
        found = statistics(source)
        faster = self.requests_per_s * self.speedup / found.requests_per_s
        rows = at_speed(jittered(source, found.arrival_grid_ms, Random(SEED)), faster)
        rows = _fitting(rows, self.prompt_tokens_max / self.shrink)
        return list(
            islice(capped(shrunk(rows, self.shrink), self.prompt_tokens_max, self.output_tokens_max), self.requests)
        )


def real(model_dir: Path) -> Half:
    """SmolLM2-135M on eight ranks of the torch engine. The trace is shrunk to what two CPU cores carry."""
    return Half(
        name="real",
        choices=SystemChoices("torch", model_dir, (1, 1, 2, 4), 0),
        requests=64,
        requests_per_s=1.0,
        shrink=16 / BLOCK_TOKENS,
        prompt_tokens_max=512,
        output_tokens_max=8,
        concurrency=4,
        coefficients=load_coefficients("smollm2_135m_cpu"),
    )


def scale() -> Half:
    """Forty modelled GPUs as 4CP4/3CP8, five times as fast as life: the engine is a cost model, everything else is real."""
    speedup = 5.0
    pool = {"n0": "4,4", "n1": "4,4", "n2": "8", "n3": "8", "n4": "8"}
    return Half(
        name="scale",
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
        requests=2_000,
        requests_per_s=7.0,
        shrink=1.0,
        prompt_tokens_max=120_000,
        output_tokens_max=2,
        concurrency=1_024,
        coefficients=load_coefficients("qwen3_30b_a3b_h20"),
        speedup=speedup,
    )


def _conversation() -> Iterator[Row]:
    """A trace with the lengths and the sharing of a published one, for as long as anybody reads."""
    return generated([Phase(86_400, 3.4, SHAPES["conversation"])], Random(SEED))


def _fitting(rows: Iterable[Row], tokens: float) -> Iterator[Row]:
    """Without the prompts that would have to be cut: a cut prompt shares more than the trace says."""
    return (row for row in rows if row.prompt_tokens <= tokens)
