"""The agent's side of a switch of geometry, and of selective eviction, on one SGLang server that has our plug-in.

`switch` is the whole protocol; the verbs by themselves are for tests and for an operator who takes a server apart. What a
server came to is never concluded from which calls returned: it is read (`states`), because a rank may die, and a call with
it, on either side of the decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx

from services.worker.engine.sglang.plugin.wire import Commit, Evict, Prepare, Release, Verb, encode
from shared.model.lattice import Composition, Group, groups_of
from shared.runtime.clock import Clock

HTTP_LIMIT_S = 30.0
"""A server that does not answer a verb for this long beyond what the verb itself may take is taken for hung."""

POLL_S = 0.02
"""Between two questions whether touched units are idle yet. A unit looks at its messages between two steps."""


class Unreachable(Exception):
    """The server did not answer, or not in a way that this plug-in would: it has died, hangs, or runs without the
    plug-in."""


@dataclass(frozen=True, slots=True)
class UnitState:
    """What one unit says of itself. `epoch` is the newest that it was told of, whatever became of it. `steps` and
    `digest` describe the batches that it ran since its group was formed: equal on all units of a group, or the group
    has come apart."""

    unit: int
    first_unit: int
    degree: int
    epoch: int
    pid: int
    steps: int
    digest: str
    total_tokens: int
    evictable_tokens: int
    free_tokens: int


@dataclass(frozen=True, slots=True)
class Switched:
    """What an attempt to switch came to. `composition` is in force now, whatever was asked for. `reason` is empty when the
    switch was made."""

    made: bool
    composition: Composition
    prepare_s: float
    commit_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a switch may take. `drain_s`: until touched units are idle. `vote_s`: from the first vote to the last; a
    unit that hangs costs this. `lease_s`: how long the server holds work for a client that has gone silent; renewed by each
    question."""

    drain_s: float = 30.0
    vote_s: float = 3.0
    lease_s: float = 5.0


class Verbs:
    """One server's plug-in. `http` has the server's address as its base URL and credentials as its headers."""

    def __init__(self, http: httpx.AsyncClient, units: int) -> None:
        self._http = http
        self._units = units

    async def prepare(self, epoch: int, composition: Composition, lease_s: float) -> bool:
        """Hold work for the touched units. True when all of them are idle and would switch. Repeating it renews the
        lease."""
        return await self._all(Prepare(epoch, composition, lease_s))

    async def commit(self, epoch: int, composition: Composition, vote_s: float) -> bool:
        """Decide. True when the composition is in force everywhere; False when the old one is. A repeated commit is
        refused."""
        return await self._all(Commit(epoch, composition, vote_s), allowance_s=vote_s)

    async def release(self, epoch: int) -> bool:
        """Let held work flow. Safe to repeat."""
        return await self._all(Release(epoch))

    async def evict(self, group: Group, blocks: Sequence[int]) -> bool:
        """Remove blocks (hashes of SGLang's KV events) and everything below them from the group. True when something
        went; KV events say what. False also while a request of the group holds any block: ask again when it is idle."""
        units = sum(1 << unit for unit in group.ranks)
        return any(await self._send(Evict(units, tuple(blocks)), 0.0))

    async def states(self) -> tuple[UnitState, ...]:
        """What every unit says of itself, in the order of units. `Unreachable` also if one of them is missing."""
        try:
            answer = await self._http.get("/server_info", timeout=HTTP_LIMIT_S)
            answer.raise_for_status()
            told = [state.get("vertumnus") for state in answer.json()["internal_states"]]
            units = sorted((UnitState(**each) for each in told if each is not None), key=lambda each: each.unit)
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            _unreachable("states", error)
        if [each.unit for each in units] != list(range(self._units)):
            raise Unreachable(f"states: {len(units)} of {self._units} units answered with the plug-in's state")
        return tuple(units)

    async def composition(self) -> Composition:
        """What is in force. `Unreachable` if units do not agree, as right after a death in the middle of a switch."""
        states = await self.states()
        degrees = tuple(each.degree for each in states if each.unit == each.first_unit)
        agreed = [group.first_rank for group in groups_of(degrees) for _ in group.ranks] if degrees else []
        if agreed != [each.first_unit for each in states]:
            raise Unreachable(
                f"units disagree about their groups: {[(each.first_unit, each.degree) for each in states]}"
            )
        return degrees

    async def _all(self, verb: Verb, allowance_s: float = 0.0) -> bool:
        return all(await self._send(verb, allowance_s))

    async def _send(self, verb: Verb, allowance_s: float) -> list[bool]:
        """One answer per unit, in the order of arrival, which says nothing."""
        try:
            answer = await self._http.post(
                "/set_internal_state", json={"server_args": encode(verb)}, timeout=HTTP_LIMIT_S + allowance_s
            )
            answer.raise_for_status()
            body: Any = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            _unreachable(type(verb).__name__.lower(), error)
        if not isinstance(body, list) or len(body) != self._units or not all(isinstance(each, bool) for each in body):
            raise Unreachable(f"{type(verb).__name__.lower()}: answered {body!r}, not one truth value per unit")
        return body


async def switch(verbs: Verbs, epoch: int, composition: Composition, limits: Limits, clock: Clock) -> Switched:
    """Prepare, commit, release. `epoch` must be above every epoch the server has been told of.

    Returns with `made` False when a unit would not or could not: the old composition then serves as before.
    `Unreachable`: the server is to be restarted, or asked for its `composition` later. Nobody needs to clean up: held
    work flows when the lease ends.
    """
    began_ns = clock.monotonic_ns()

    def since(start_ns: int) -> float:
        return (clock.monotonic_ns() - start_ns) / 1e9

    ready = await verbs.prepare(epoch, composition, limits.lease_s)
    while not ready and since(began_ns) < limits.drain_s:
        await clock.sleep(POLL_S)
        ready = await verbs.prepare(epoch, composition, limits.lease_s)
    prepare_s = since(began_ns)
    commit_began_ns = clock.monotonic_ns()
    made = ready and await verbs.commit(epoch, composition, limits.vote_s)
    commit_s = since(commit_began_ns) if ready else 0.0
    await verbs.release(epoch)
    reason = "" if made else "units voted against it" if ready else f"units were not ready within {limits.drain_s:g} s"
    return Switched(made, await verbs.composition(), prepare_s, commit_s, reason)


def _unreachable(verb: str, error: Exception) -> NoReturn:
    raise Unreachable(f"{verb}: {type(error).__name__}: {error}") from error
