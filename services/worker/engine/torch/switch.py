"""The switch of a node's prefill ranks from one geometry to the next: all of them or none, in two rounds.

    Prepare ──every rank is ready──▶ Commit ──every rank──▶ the new epoch is served
       └──one refuses, or says nothing for `switch_timeout_s`──▶ Abort ──▶ the old epoch is served as before

1.  Ranks are parked because a rank handles its commands in order and no step runs. They do not meet in a collective: one
    that is stopped would hold up its peers, who could not be told to go back.
2.  Before the first Commit is sent nothing has changed anywhere. Going back does not wait for a rank that is silent. It
    finds Prepare and Abort, in this order, when it wakes up; if it does not run, it is given up as hung (see `Ranks`).
3.  From the first Commit on there is no way back: a rank that refuses it or dies has left the others, and the engine is lost.
4.  A rank that dies before that ends the engine as at any other time: groups with a dead rank cannot be repaired.
"""

import asyncio
from collections.abc import Iterator, Sequence

from services.worker.engine.kv_pool import KvPool
from services.worker.engine.protocol import Busy, EngineDied, EngineError, RankAdopted, RolledBack, StaleEpoch
from services.worker.engine.torch.messages import Abort, Commit, Done, Prepare, Reply
from services.worker.engine.torch.rank_process import RankProcess
from services.worker.engine.torch.ranks import Ranks
from services.worker.engine.torch.unbroken import to_the_end
from shared.model.lattice import Composition, Group, groups_of

Answers = dict[RankProcess, asyncio.Future[Reply]]


class Switch:
    """Which geometry the ranks serve, and how they get to another."""

    def __init__(self, ranks: Ranks, pool: KvPool, numbers: Iterator[int], limit_s: float) -> None:
        self._ranks, self._pool, self._numbers, self._limit_s = ranks, pool, numbers, limit_s
        self.epoch = 0
        self.running = False
        self._composition: Composition = ()
        self._adopted: tuple[RankAdopted, ...] = ()

    async def adopt(self, epoch: int, composition: Composition, *, stepping: bool) -> tuple[RankAdopted, ...]:
        """See `Engine.adopt`. `stepping`: a step runs now."""
        groups = groups_of(composition)
        if sum(composition) != len(self._ranks.prefill):
            raise ValueError(f"composition {composition}: must cover {len(self._ranks.prefill)} prefill ranks")
        if epoch < max(self.epoch, 1):
            raise StaleEpoch(f"epoch {epoch}: the engine serves {self.epoch}")
        if epoch == self.epoch and composition != self._composition:
            raise ValueError(f"composition {composition}: epoch {epoch} is served with {self._composition}")
        if epoch == self.epoch:
            return self._adopted
        if stepping or self.running:
            raise Busy(f"epoch {epoch}: {'another switch' if self.running else 'a step'} is running")
        self.running = True
        return await to_the_end(self._switch(epoch, composition, groups))

    async def _switch(self, epoch: int, composition: Composition, groups: Sequence[Group]) -> tuple[RankAdopted, ...]:
        try:
            await self._prepare(epoch, groups)
            self._adopted = await self._commit(epoch)
        finally:
            self.running = False
        self._pool.adopt(composition)
        self.epoch, self._composition = epoch, composition
        return self._adopted

    async def _prepare(self, epoch: int, groups: Sequence[Group]) -> None:
        """Errors: RolledBack when every rank has been told; EngineDied."""
        answers: Answers = {
            self._ranks.prefill[rank]: self._ranks.prefill[rank].ask(Prepare(next(self._numbers), epoch, group))
            for group in groups
            for rank in group.ranks
        }
        await asyncio.wait(answers.values(), timeout=self._limit_s, return_when=asyncio.FIRST_EXCEPTION)
        if (obstacle := self._obstacle(answers)) is not None:
            await self._abort(answers)
            raise RolledBack(f"epoch {epoch}: {obstacle}; epoch {self.epoch} is served as before")

    def _obstacle(self, answers: Answers) -> str | None:
        """Why the ranks may not commit. A refusal counts for more than a silence that it cut short. Errors: EngineDied."""
        errors = [error for answer in answers.values() if answer.done() and (error := answer.exception())]
        for error in errors:
            if isinstance(error, EngineDied):
                raise error
        if errors:
            return str(errors[0])
        silent = [rank.rank for rank, answer in answers.items() if not answer.done()]
        return f"ranks {silent} were not ready within {self._limit_s:g} s" if silent else None

    async def _abort(self, prepared: Answers) -> None:
        """Returns when the ranks that can answer have gone back. Errors: EngineDied."""
        aborted = {rank: rank.ask(Abort(next(self._numbers))) for rank in prepared}
        for rank, answer in prepared.items():
            if not answer.done():
                answer.cancel()
                aborted.pop(rank).cancel()
        await asyncio.gather(*aborted.values())

    async def _commit(self, epoch: int) -> tuple[RankAdopted, ...]:
        """Errors: EngineDied."""
        ranks = self._ranks.prefill
        try:
            replies = await asyncio.gather(*(rank.ask(Commit(next(self._numbers), epoch)) for rank in ranks))
        except EngineDied:
            raise
        except EngineError as error:
            self._ranks.lose(f"epoch {epoch}: {error}")
            raise EngineDied(str(error)) from error
        return tuple(
            RankAdopted(rank.rank, reply.seconds)
            for rank, reply in zip(ranks, replies, strict=True)
            if isinstance(reply, Done)
        )
