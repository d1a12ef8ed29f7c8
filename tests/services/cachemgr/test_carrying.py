"""Orders to agents: what is asked, what comes back, and an asking that breaks."""

import pytest

from services.cachemgr.carrying import Carrier
from shared.contracts.commands import Refused, encode_message
from shared.contracts.copy_commands import Evict
from shared.contracts.ids import NodeId, WorkerId
from shared.contracts.subjects import Subjects
from shared.runtime.memory import ManualClock, MemoryBus
from shared.runtime.ports import Handler

SUBJECTS = Subjects("main")
ORDER = Evict(term=1, operation="reclaim-1-1", worker=WorkerId("n0/1/0"), block_ids=bytes(16))


class SmallBus(MemoryBus):
    """One that no message fits."""

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        raise ValueError(f"{subject}: {len(payload)} bytes are too many")


def refusing(reason: str, asked: list[str]) -> Handler:
    async def answer(subject: str, _: bytes) -> bytes:
        asked.append(subject)
        return encode_message(Refused(reason=reason))

    return answer


@pytest.mark.parametrize(("reason", "told", "times"), [("full", {"reclaim-1-1": "full"}, 1), ("busy", {}, 4)])
async def test_a_refusal_is_told_and_a_busy_agent_asked_again(reason: str, told: dict[str, str], times: int) -> None:
    clock, asked = ManualClock(), list[str]()
    bus = MemoryBus(clock)
    await bus.subscribe(SUBJECTS.agent(NodeId("n0")), refusing(reason, asked))
    carrier = Carrier(bus, SUBJECTS, clock)
    for _ in range(3):
        carrier.carry({"reclaim-1-1": ORDER})
        await clock.advance(1.0)
    assert carrier.told == told
    assert len(asked) == times
    carrier.carry({})
    assert carrier.told == {}


async def test_an_asking_that_breaks_is_not_passed_over_in_silence() -> None:
    clock = ManualClock()
    carrier = Carrier(SmallBus(clock), SUBJECTS, clock)
    carrier.carry({"reclaim-1-1": ORDER})
    await clock.advance(1.0)
    with pytest.raises(ValueError, match="too many"):
        carrier.carry({"reclaim-1-1": ORDER})
    await carrier.stop()
