"""Bugs planted into the services, to see that scenarios and checkers catch them: `python -m simulation.faults.planted`.

Each replaces one function of production code by one that forgets what it is for, for as long as a block runs.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import typer

from services.ledger import batches, readmodels
from services.router import claims, decider, frames, loads
from services.worker import desk, incarnation
from services.worker.engine import kv_pool
from shared.contracts.commands import Accepted, Assign, Refused
from shared.contracts.ids import worker_id
from shared.model import prefix_index
from shared.runtime import appending, fence, outbox
from simulation.faults.running import judge
from simulation.faults.scenario import draw

SEEDS_MAX = 200
"""A bug that hides for so long is not caught."""


class Plant(NamedTuple):
    """`forget` is given the function `name` of `where` and returns its replacement."""

    bug: str
    where: Any
    name: str
    forget: Callable[[Any], Any]


def caught_by(plant: Plant, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first of the seeds that fails with the bug in place, and what was violated."""
    with patch.object(plant.where, plant.name, plant.forget(getattr(plant.where, plant.name))):
        for seed in seeds:
            verdict = judge(draw(seed))
            if not verdict.clean:
                return seed, verdict.violations[0]
    return None


def _keep_reservation(release: Any) -> Any:
    def kept(state: loads.Loads, request: Any, opened: Any) -> None:
        if request not in state.open:
            release(state, request, opened)

    return kept


def _same_attempt(assigned: Any) -> Any:
    return lambda state, request, attempt, *rest: assigned(state, request, max(1, attempt - 1), *rest)


def _any_epoch(assign: Any) -> Any:
    """The worker that has the rank now takes what was meant for an older one."""

    def taken(self: incarnation.Incarnation, command: Assign) -> Accepted | Refused:
        workers = self.state.served.workers(self.state.node)
        rank = int(command.worker.rsplit("/", 1)[1])
        here = worker_id(self.state.node, self.state.served.epoch, rank)
        if here in workers:
            command = command.model_copy(update={"worker": here})
        answer: Accepted | Refused = assign(self, command)
        return answer

    return taken


def _unfenced(append_once: Any) -> Any:
    return lambda log, entries, _expected, clock: append_once(log, entries, {}, clock)


def _blind_repeat(_read_back: Any) -> Any:
    """What was not acknowledged is appended again behind whatever is there."""

    async def repeated(log: Any, _entries: Any, relied_on: dict[str, int], _clock: Any) -> None:
        for subject in relied_on:
            found = await log.last_on(subject)
            relied_on[subject] = found[0] if found else 0

    return repeated


def _no_wait(_stored: Any) -> Any:
    async def at_once(self: outbox.Outbox, envelope: Any) -> None:
        """Does not wait."""

    return at_once


def _every_frame(take: Any) -> Any:
    def taken(self: frames.FrameOrder, frame: Any) -> list[frames.Piece]:
        if frame.index > self.tokens:
            self.tokens = frame.index  # the gap before it is not noticed
        pieces: list[frames.Piece] = take(self, frame)
        return pieces

    return taken


def _frame_again(deliver: Any) -> Any:
    def delivered(self: frames.FrameOrder, frame: Any) -> list[frames.Piece]:
        known = self.tokens
        self.tokens = min(self.tokens, frame.index)
        pieces: list[frames.Piece] = deliver(self, frame)
        self.tokens = max(known, self.tokens)
        return pieces

    return delivered


def _unchained(link: Any) -> Any:
    return lambda _head, raw: link(b"", raw)


def _nothing(result: Any = None) -> Callable[[Any], Any]:
    return lambda _original: lambda *_: result


PLANTS = (
    Plant("a redirected request keeps its reservation", loads, "_release", _keep_reservation),
    Plant("a redirected request is assigned under the attempt it had", decider, "assigned", _same_attempt),
    Plant("a request may end twice", decider, "end", lambda _: lambda _state, fact: [fact]),
    Plant("an agent takes what is meant for an older epoch", incarnation.Incarnation, "assign", _any_epoch),
    Plant("what is queued at a retiring worker is not given back", incarnation.Incarnation, "give_back", _nothing(0)),
    Plant("a repeated assignment is queued again", desk.Desk, "answer_to", _nothing()),
    Plant("a leader's append is not fenced", fence, "append_once", _unfenced),
    Plant("an append is repeated without a look at the log", appending, "_read_back", _blind_repeat),
    Plant("a command goes out before its decision is stored", outbox.Outbox, "stored", _no_wait),
    Plant("a gap between two frames is not noticed", frames.FrameOrder, "take", _every_frame),
    Plant("a repeated frame is given to the client again", frames.FrameOrder, "_deliver", _frame_again),
    Plant("a lost worker keeps its credit", prefix_index.PrefixIndex, "clear", _nothing(())),
    Plant("a finished request keeps its pins", kv_pool.KvPool, "release", _nothing()),
    Plant("an ended request's prompt is kept", claims.Claims, "drop", _nothing()),
    Plant("a row of the record says nothing of those before it", batches, "link", _unchained),
    Plant("the record keeps runs of blocks that are gone", readmodels, "_settle_runs", _nothing()),
)


def main(seeds: Annotated[int, typer.Option(min=1, help="how long each bug may hide")] = SEEDS_MAX) -> None:
    """Plant each bug and say which seed catches it. Ends with code 1 if one is not caught."""
    missed = 0
    for plant in PLANTS:
        caught = caught_by(plant, range(seeds))
        missed += caught is None
        typer.echo(f"{plant.bug}: {'not caught' if caught is None else f'seed {caught[0]}: {caught[1]:.160}'}")
    raise typer.Exit(code=1 if missed else 0)


if __name__ == "__main__":
    typer.run(main)
