"""The agent's half of a switch, against a server in memory that keeps to the protocol and misbehaves on demand."""

import json
from dataclasses import dataclass, field

import httpx
import pytest

from services.worker.engine.sglang.plugin import wire
from services.worker.engine.sglang.plugin.wire import Commit, Evict, Prepare, Release
from services.worker.engine.sglang.verbs import Limits, Switched, Unreachable, Verbs, switch
from shared.model.lattice import Composition, Group, groups_of


class SkippingClock:
    """Whoever sleeps is woken at once, that much later."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        return self._now_ns

    def monotonic_ns(self) -> int:
        return self._now_ns

    async def sleep(self, seconds: float) -> None:
        self._now_ns += round(seconds * 1e9)


LIMITS = Limits(drain_s=1.0, vote_s=3.0, lease_s=5.0)


@dataclass
class Server:
    """Four units. `busy` questions are answered with no; `votes` decides a commit."""

    composition: Composition = (1, 1, 1, 1)
    busy: int = 0
    votes: bool = True
    silent: type[wire.Verb] | None = None
    seen: list[wire.Verb] = field(default_factory=list)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info":
            groups = [(unit, group) for group in groups_of(self.composition) for unit in group.ranks]
            states = [
                {"vertumnus": {"unit": unit, "first_unit": group.first_rank, "degree": group.degree, **SAME}}
                for unit, group in reversed(groups)
            ]
            return httpx.Response(200, json={"internal_states": states})
        verb = wire.decode(json.loads(request.content)["server_args"], 4)
        assert verb is not None
        self.seen.append(verb)
        if self.silent and isinstance(verb, self.silent):
            raise httpx.ReadTimeout("silence", request=request)
        match verb:
            case Prepare():
                self.busy -= 1
                return httpx.Response(200, json=[True, self.busy < 0, True, True])
            case Commit(composition=composition):
                if self.votes:
                    self.composition = composition
                return httpx.Response(200, json=[self.votes] * 4)
            case Release():
                return httpx.Response(200, json=[True] * 4)
            case Evict(units=units):
                return httpx.Response(200, json=[bool(units >> unit & 1) for unit in range(4)])


SAME = {"epoch": 1, "pid": 1, "steps": 0, "digest": "", "total_tokens": 0, "evictable_tokens": 0, "free_tokens": 0}


async def switched(server: Server, composition: Composition = (2, 1, 1)) -> Switched:
    transport = httpx.MockTransport(server.answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        return await switch(Verbs(http, 4), 7, composition, LIMITS, SkippingClock())


async def test_a_switch_asks_until_all_are_ready() -> None:
    server = Server(busy=2)
    result = await switched(server)
    assert result.made
    assert result.composition == (2, 1, 1)
    asked = Prepare(7, (2, 1, 1), 5.0)
    assert server.seen == [asked, asked, asked, Commit(7, (2, 1, 1), 3.0), Release(7)]


async def test_units_that_stay_busy_are_left_as_they_were() -> None:
    server = Server(busy=1000)
    result = await switched(server)
    assert (result.made, result.composition, result.commit_s) == (False, (1, 1, 1, 1), 0.0)
    assert "not ready within 1 s" in result.reason
    assert server.seen[-1] == Release(7)
    assert not any(isinstance(verb, Commit) for verb in server.seen)


async def test_a_vote_against_it_leaves_the_old_composition() -> None:
    server = Server(votes=False)
    result = await switched(server)
    assert (result.made, result.composition) == (False, (1, 1, 1, 1))
    assert server.seen[-1] == Release(7)


async def test_what_is_in_force_is_read_and_not_concluded() -> None:
    class Elsewhere(Server):
        def answer(self, request: httpx.Request) -> httpx.Response:
            self.composition = (4,)
            return super().answer(request)

    assert (await switched(Elsewhere(votes=False))).composition == (4,)


@pytest.mark.parametrize("silent", [Prepare, Commit, Release])
async def test_a_server_that_falls_silent_is_unreachable(silent: type[wire.Verb]) -> None:
    with pytest.raises(Unreachable, match=silent.__name__.lower()):
        await switched(Server(silent=silent))


@pytest.mark.parametrize("body", ["[true, true]", '{"updated": true}', "[1, 1, 1, 1]", "no"])
async def test_an_answer_that_is_not_the_plugins_is_none(body: str) -> None:
    class Plain(Server):
        def answer(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, text=body)

    with pytest.raises(Unreachable, match="prepare"):
        await switched(Plain())


async def test_units_that_disagree_have_no_composition() -> None:
    states = [{"vertumnus": {"unit": unit, "first_unit": 0, "degree": 2, **SAME}} for unit in range(4)]

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"internal_states": states})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as http:
        with pytest.raises(Unreachable, match="disagree"):
            await Verbs(http, 4).composition()
        states.pop()
        with pytest.raises(Unreachable, match="3 of 4"):
            await Verbs(http, 4).composition()


async def test_an_eviction_names_the_units_of_its_group() -> None:
    server = Server((2, 2))
    async with httpx.AsyncClient(transport=httpx.MockTransport(server.answer), base_url="http://server") as http:
        assert await Verbs(http, 4).evict(Group(2, 2), [5, -9])
    assert server.seen == [Evict(0b1100, (5, -9))]
