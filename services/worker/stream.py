"""What follows a prefill: the first token at once, then the hand-off of its KV, and the tokens that decode makes, here or at
the node of the decode rank that the router chose."""

from services.worker.decider import Prefilled, hand_off
from services.worker.elsewhere import Elsewhere
from services.worker.engine.protocol import Engine, HandedOff
from services.worker.frames import Frames
from services.worker.job import Job
from services.worker.origins import of_job
from services.worker.ports import NodePorts
from services.worker.speaking import Speaker, continuation_of
from shared.contracts.ids import node_of


class Stream:
    """One job's tokens. The first frame does not wait for the log: a frame is no decision, and TTFT counts."""

    def __init__(self, job: Job, ports: NodePorts, engine: Engine, frames: Frames, elsewhere: Elsewhere) -> None:
        self._job, self._ports, self._engine, self._elsewhere = job, ports, engine, elsewhere
        self._speaker = Speaker(job.assign, frames, ports.clock)

    @property
    def index(self) -> int:
        """How many tokens this node has sent."""
        return self._speaker.index

    async def run(self, prefilled: Prefilled) -> None:
        """Every token up to a stop token, `max_new_tokens`, or the first alone if nothing decodes.

        Errors: EngineError, EngineDied; Unavailable if the router cannot be told.
        """
        job, assign, first = self._job, self._job.assign, prefilled.item.first_token
        assert first is not None, "only a finished prefill is streamed"
        alone = continuation_of(assign) is None
        stopped = first.token in assign.stop_tokens
        await self._speaker.say(
            first,
            finish="stop" if stopped else "length" if alone else None,
            cached_tokens=prefilled.cached_tokens,
            queue_us=prefilled.queue_us,
            fetch_us=job.fetched.us if job.fetched else 0,
            prefill_us=prefilled.prefill_us,
        )
        if assign.decode_worker is None or alone or stopped:
            return
        if node_of(assign.decode_worker) == self._ports.node:
            self._handed(await self._engine.hand_off(job.key.engine_id))
            await self._speaker.decode(self._engine, job.key.engine_id, first.token, prefilled.past)
        else:
            async with self._elsewhere.takes_over(job, first.token) as taken:
                self._handed(await taken.handed_off())
                await taken.ended()

    def _handed(self, handed_off: HandedOff) -> None:
        """The prefill's KV is needed no longer."""
        self._ports.outbox.record(hand_off(self._job, handed_off), of_job(self._job))
        self._engine.release(self._job.key.engine_id)
        self._job.handed_off = True
