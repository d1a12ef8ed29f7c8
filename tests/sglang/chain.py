"""A server driven through compositions under traffic, every answer compared with a fixed server's."""

import asyncio
from collections.abc import Iterator, Sequence

import httpx

from services.worker.engine.sglang.verbs import Limits, Switched, Verbs, switch
from shared.model.lattice import Composition, groups_of
from shared.runtime.clock import SystemClock
from tests.support.switching_servers import generate, generate_all

PATIENT = Limits(drain_s=600.0, vote_s=60.0, lease_s=300.0)
AT_ONCE = 8
NEW_TOKENS = 4


async def expected(http: httpx.AsyncClient, prompts: Sequence[list[int]]) -> list[list[int]]:
    return await generate_all(http, prompts, AT_ONCE, NEW_TOKENS)


async def switched(verbs: Verbs, epochs: Iterator[int], composition: Composition) -> Switched:
    """A switch that must be made."""
    result = await switch(verbs, next(epochs), composition, PATIENT, SystemClock())
    assert (result.made, result.composition) == (True, composition), result
    return result


async def prepared(verbs: Verbs, epoch: int, composition: Composition) -> None:
    """Held, and every unit ready."""
    while not await verbs.prepare(epoch, composition, PATIENT.lease_s):
        pass  # each question takes a turn of every scheduler


async def check_groups(verbs: Verbs) -> None:
    """All ranks of a group have run the same batches over equal trees. To be asked when nothing runs."""
    states = await verbs.states()
    for group in groups_of(await verbs.composition()):
        mates = [states[unit] for unit in group.ranks]
        seen = {(each.steps, each.digest, each.total_tokens, each.evictable_tokens, each.free_tokens) for each in mates}
        assert len(seen) == 1, (group, seen)


async def travel(
    http: httpx.AsyncClient,
    verbs: Verbs,
    epochs: Iterator[int],
    stops: Sequence[Composition],
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
) -> None:
    """Go through `stops`, an equal share of the prompts under way at each switch. Lost, failed and wrong answers all show."""
    share = len(prompts) // len(stops)
    for index, stop in enumerate(stops):
        part = slice(index * share, (index + 1) * share)
        got, _ = await asyncio.gather(
            generate_all(http, prompts[part], AT_ONCE, NEW_TOKENS), switched(verbs, epochs, stop)
        )
        wrong = [at for at, (one, other) in enumerate(zip(got, answers[part], strict=True)) if one != other]
        assert not wrong, f"wrong answers on the way to {stop}: {wrong}"
        await check_groups(verbs)
        assert any(each.steps for each in await verbs.states()), "something ran that mates could have done differently"


async def check_everywhere(http: httpx.AsyncClient, prompt: list[int], answer: list[int], units: int) -> None:
    """Whichever unit is addressed, the answer is right."""
    for unit in range(units):
        assert (await generate(http, prompt, NEW_TOKENS, routed_dp_rank=unit))[0] == answer, unit
