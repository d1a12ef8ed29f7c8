"""Answers a forecast's question beside the event loop: a compiler to load, and some ten milliseconds of arithmetic."""

import asyncio
import signal
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple, Protocol

import structlog

from services.controller.forecast import Question, Scores
from shared.model.cost import Coefficients

ANSWER_S_MAX = 60.0
"""Counts bound a question to a few seconds on any machine; a process that is silent for longer stands still."""


class Scorer(Protocol):
    """Answers a question with a score for each of its pools, or None if it cannot."""

    async def scores(self, question: Question) -> Scores | None:
        """As `replaying.scores`."""


class Forecasts(NamedTuple):
    """Who answers, and in whose seconds prompts are replayed."""

    scorer: Scorer
    coefficients: Coefficients


class _Child(NamedTuple):
    process: BaseProcess
    line: Connection

    def ask(self, question: Question, limit_s: float) -> Scores:
        """Blocks. Errors: EOFError, OSError (TimeoutError is one)."""
        self.line.send(question)
        if not self.line.poll(limit_s):
            raise TimeoutError(f"no answer within {limit_s:g} s")
        answer: Scores = self.line.recv()
        return answer


class ProcessScorer:
    """A process of its own, started by the first question. Questions that come meanwhile wait."""

    def __init__(self) -> None:
        self._limit_s = ANSWER_S_MAX
        self._child: _Child | None = None
        self._turn = asyncio.Lock()
        self._logger = structlog.get_logger(component="forecaster")

    async def scores(self, question: Question) -> Scores | None:
        """None if the process died or stands still; the next question starts another."""
        async with self._turn:
            if self._child is None:
                self._child = _start()
            try:
                return await asyncio.to_thread(self._child.ask, question, self._limit_s)
            except (EOFError, OSError) as error:
                self._logger.error("the forecast's process gave no answer", error=repr(error))
                self.close()
                return None
            except asyncio.CancelledError:
                # The answer under way would be taken for that to the next question.
                self.close()
                raise

    def close(self) -> None:
        """End the process, whatever it does: nothing is lost with it, and a process that is stopped hears nothing but this."""
        if self._child is not None:
            self._child.process.kill()
            self._child.process.join()
            self._child = None


def _start() -> _Child:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), name="forecast", daemon=True)
    process.start()
    theirs.close()
    return _Child(process, ours)


def _serve(line: Connection) -> None:
    """Answer until the other end is gone."""
    # Here, so that only the process has the compiler and what it brings along, 150 MB (ADR 33).
    from services.controller.replaying import scores

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            question = line.recv()
        except EOFError:
            return
        line.send(scores(question))
