"""The claim check: prompts are fetched from their routers just before they are needed, because no log may hold them."""

import asyncio
from collections.abc import Callable, Iterable

import numpy as np
import structlog

from services.worker.job import Job, JobKey
from shared.contracts.commands import CLAIM_FRAME_BYTES, TOKEN_BYTES, Assign, Claim, encode_message
from shared.contracts.subjects import Subjects
from shared.model.blocks import Tokens
from shared.runtime.clock import Clock
from shared.runtime.ports import Bus, NoReply

REPLY_S_MAX = 1.0
TRIES_MAX = 3
"""A router that is silent for three seconds is about to be declared lost."""

RETRY_S = 0.1


class Claims:
    """Tokens that are here or on their way, by job. The queue says which and bounds how many bytes they are."""

    def __init__(self, bus: Bus, subjects: Subjects, clock: Clock) -> None:
        self._bus = bus
        self._subjects = subjects
        self._clock = clock
        self._fetches: dict[JobKey, asyncio.Task[Tokens | None]] = {}
        self._logger = structlog.get_logger(component="claims")

    def prefetch(self, jobs: Iterable[Job], ended: Callable[[], None]) -> None:
        """Begin to fetch for each of `jobs` that has not begun. `ended` is called when one of them has come or is lost."""
        for job in jobs:
            if job.key not in self._fetches:
                fetch = asyncio.create_task(self.fetch(job.assign), name=f"claim {job.key.engine_id}")
                fetch.add_done_callback(lambda _: ended())
                self._fetches[job.key] = fetch

    def keep(self, wanted: Iterable[Job], of: Iterable[Job]) -> None:
        """Drop the tokens of every one `of` these that is not wanted."""
        keys = {job.key for job in wanted}
        for job in of:
            if job.key not in keys:
                self.drop(job)

    def has_arrived(self, job: Job) -> bool:
        """Whether `tokens` can be asked for."""
        fetch = self._fetches.get(job.key)
        return fetch is not None and fetch.done() and fetch.result() is not None

    def is_lost(self, job: Job) -> bool:
        """Its router has not got the prompt any more, or is silent."""
        fetch = self._fetches.get(job.key)
        return fetch is not None and fetch.done() and fetch.result() is None

    def tokens(self, job: Job) -> Tokens:
        """The prompt. The caller has asked `has_arrived`."""
        tokens = self._fetches[job.key].result()
        assert tokens is not None, f"{job.key} has lost its prompt"
        return tokens

    def drop(self, job: Job) -> None:
        """Nobody needs these tokens (any more)."""
        if (fetch := self._fetches.pop(job.key, None)) is not None:
            fetch.cancel()

    def close(self) -> None:
        """Stop fetching."""
        for fetch in self._fetches.values():
            fetch.cancel()
        self._fetches.clear()

    async def fetch(self, assign: Assign) -> Tokens | None:
        """The prompt, for the caller alone; None if the router has not got it any more, or is silent."""
        subject = self._subjects.claim(assign.router)
        frames: list[bytes] = []
        offset = 0
        while offset < assign.prompt_tokens:
            claim = Claim(request=assign.request, attempt=assign.attempt, offset=offset)
            frame = await self._ask(subject, encode_message(claim))
            if frame is None:
                self._logger.warning("claim lost", request=assign.request, router=assign.router, offset=offset)
                return None
            tokens = len(frame) // TOKEN_BYTES
            if len(frame) % TOKEN_BYTES or len(frame) > CLAIM_FRAME_BYTES or offset + tokens > assign.prompt_tokens:
                self._logger.error("bad claim reply", request=assign.request, offset=offset, frame_bytes=len(frame))
                return None
            frames.append(frame)
            offset += tokens
        return np.frombuffer(b"".join(frames), dtype="<u4")

    async def _ask(self, subject: str, claim: bytes) -> bytes | None:
        """One frame; None if the router answers that it has nothing, or does not answer."""
        for attempt in range(1, TRIES_MAX + 1):
            try:
                return await self._bus.request(subject, claim, REPLY_S_MAX) or None
            except NoReply:
                await self._clock.sleep(RETRY_S * attempt)
        return None
