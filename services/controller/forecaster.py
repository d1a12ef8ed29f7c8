"""Answers a forecast's question beside the event loop: half a second of arithmetic for a pool of 40 GPUs."""

import asyncio
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple, Protocol

import structlog

from services.controller.forecast import Question
from shared.model.cost import Coefficients


class Scorer(Protocol):
    """Answers a question with a score for each of its pools, or () if it cannot."""

    async def scores_ppm(self, question: Question) -> tuple[int, ...]:
        """As `replaying.scores_ppm`."""


class Forecasts(NamedTuple):
    """Who answers, and in whose seconds prompts are replayed."""

    scorer: Scorer
    coefficients: Coefficients


class ProcessScorer:
    """A process of its own, started by the first question. Questions that come meanwhile wait."""

    def __init__(self) -> None:
        self._process: Executor | None = None
        self._logger = structlog.get_logger(component="forecaster")

    async def scores_ppm(self, question: Question) -> tuple[int, ...]:
        """() if the process died; the next question starts another."""
        if self._process is None:
            self._process = ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._process, _answer, question)
        except BrokenExecutor as error:
            self._logger.error("the forecast's process died", error=str(error))
            self.close()
            return ()

    def close(self) -> None:
        """End the process, without waiting for an answer under way."""
        if self._process is not None:
            self._process.shutdown(wait=False, cancel_futures=True)
            self._process = None


def _answer(question: Question) -> tuple[int, ...]:
    # Here, so that only the process has numpy: it is a third of the controller's memory.
    from services.controller.replaying import scores_ppm

    return scores_ppm(question)
