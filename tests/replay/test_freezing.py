"""From a state that was kept in the middle comes what comes from the beginning."""

from collections import Counter

import pytest

from replay.beginnings import registration
from replay.findings import Findings
from replay.freezing import EARLIER, Frozen, known, read, together
from replay.parts import Part, parts
from replay.verifying import EVERYTHING, LogVerifier, Span
from services.cachemgr import choosing
from services.router import decider as router
from shared.contracts.envelope import Stored
from shared.contracts.events import NodeRegistered
from shared.runtime.states import BadState, freeze
from tests.replay.lagging_world import World
from tests.replay.test_verifying import second_best, verified


def kept_at(log: list[Stored], seq: int, part: Part | None = None) -> Frozen:
    """As a file has it."""
    begun = [found for each in log[:seq] if (found := registration(each))]
    share = {} if part is None else {"part": part}
    verifier = LogVerifier("log", begun, Span(from_seq=10**9), Findings(), **share)
    for each in log[:seq]:
        verifier.fold(each)
    return read(freeze(verifier.frozen(seq)))


def verified_from(frozen: Frozen, log: list[Stored], span: Span = EVERYTHING) -> Findings:
    findings = Findings()
    behind = log[frozen.stream_seq :]
    begun = known(frozen, [found for each in behind if (found := registration(each))])
    verifier = LogVerifier("log", begun, span, findings, frozen=frozen, deep=True)
    for each in behind:
        verifier.fold(each)
    verifier.end()
    verifier.check()
    return findings


def a_life(seed: int, policy: str = "paper") -> World:
    """Routers that lag, die and join, a node that comes back, copies."""
    world = World(seed, policy=policy)
    world.run(500)
    world.lose_node("n1", 1)
    world.kill_router()
    world.run(150)
    world.bring_up("n1", 2, 2)
    world.join_router()
    world.run(600)
    return world


@pytest.mark.parametrize(("seed", "policy"), [(0, "paper"), (1, "vertumnus"), (2, "vertumnus")])
def test_from_anywhere_on_every_decision_comes_out_again(seed: int, policy: str) -> None:
    world = a_life(seed, policy)
    skipped, checked = 0, Counter[str]()
    for share in (3, 5, 8):
        seq = len(world.log) * share // 10
        found = verified_from(kept_at(world.log, seq), world.log)
        whole = verified(world.log, Span(from_seq=seq + 1))
        assert found.differences == whole.differences == []
        assert {reason for _, reason in found.skipped} <= {EARLIER}
        for kind, number in whole.checked.items():
            assert found.checked[kind] + found.skipped[kind, EARLIER] == number, kind
        skipped, checked = skipped + found.skipped.total(), checked + found.checked
    assert skipped * 10 < checked.total(), "what was decided on less lies right behind the beginning"
    assert min(checked[kind] for kind in ("request-assigned", "cache-scan-completed", "window-closed")) > 10


def test_a_state_can_be_kept_from_a_state() -> None:
    world = a_life(3)
    half, later = len(world.log) // 2, len(world.log) * 3 // 4
    first = kept_at(world.log, half)
    begun = known(first, [found for each in world.log[half:later] if (found := registration(each))])
    verifier = LogVerifier("log", begun, Span(from_seq=10**9), Findings(), frozen=first)
    for each in world.log[half:later]:
        verifier.fold(each)
    second = read(freeze(verifier.frozen(later)))
    assert verified_from(second, world.log) == verified_from(kept_at(world.log, later), world.log)


def test_parts_keep_together_what_one_keeps() -> None:
    world = a_life(4)
    seq = len(world.log) // 2
    parted = together([kept_at(world.log, seq, part) for part in parts(4)])
    assert verified_from(parted, world.log) == verified_from(kept_at(world.log, seq), world.log)


def test_faults_behind_the_beginning_are_found() -> None:
    world = World(2)
    world.run(500)
    seq = len(world.log)
    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(router, "choose", second_best(router.choose))
        world.run(200)
    assert verified_from(kept_at(world.log, seq), world.log).differing["request-assigned"] > 5


def test_demand_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, another copy would have been chosen."""
    world = World(1)
    world.run(1_200)
    seq = next(each.stream_seq for each in world.log if each.event.type == "replication-requested") - 40
    found = verified_from(kept_at(world.log, seq), world.log)
    assert (found.differences, found.checked["replication-requested"] > 0) == ([], True)
    wish = choosing._wish
    monkeypatch.setattr(choosing, "_wish", lambda *asked: wish(*asked)._replace(score=1_000.0))
    assert verified_from(kept_at(world.log, seq), world.log).differing["replication-requested"]


def test_behind_dropped_block_events_everything_is_known_again_from_a_kept_state() -> None:
    world = World(1)
    world.run(1_200)
    begin, kept_seq = (len(world.log) * each // 10 for each in (3, 5))
    frozen, findings = kept_at(world.log, kept_seq), Findings()
    begun = [found for each in world.log if (found := registration(each))]
    verifier = LogVerifier("log", begun, EVERYTHING, findings)
    for each in world.log[:begin]:
        verifier.fold(each)
    verifier.lose_blocks()
    for each in world.log[begin:kept_seq]:
        if each.data.CHANNEL != "cache":
            verifier.fold(each)
    before, skipped = findings.checked.copy(), findings.skipped.total()
    verifier.resume(frozen)
    for each in world.log[kept_seq:]:
        verifier.fold(each)
    verifier.end()
    assert findings.differences == []
    whole = verified(world.log, Span(from_seq=kept_seq + 1)).checked
    for kind in ("cache-scan-completed", "replication-requested", "request-assigned"):
        assert findings.checked[kind] - before[kind] >= whole[kind] * 2 // 3 > 0, kind
    assert findings.skipped.total() - skipped < 30


def test_a_process_whose_beginning_nobody_kept_is_told_apart() -> None:
    world = World(0)
    world.run(300)
    seq = len(world.log)
    frozen = kept_at(world.log, seq)
    late = world.join_router((), seq - 50)
    world.run(400)
    begun = [found for each in world.log[seq:] if (found := registration(each))]
    assert not frozen.covers(begun)
    assert kept_at(world.log, seq - 60).covers(begun)
    found = verified_from(frozen, world.log)
    assert found.differences == []
    rejected = [e for e in world.log if e.event.type == "request-rejected" and e.event.source == late.source]
    assert found.skipped["request-rejected", EARLIER] >= len(rejected) > 0, "it had been told of no node"


def test_what_is_no_kept_state_is_refused() -> None:
    world = World(0)
    world.run(60)
    frozen = kept_at(world.log, len(world.log))
    with pytest.raises(BadState, match="not what deciders have folded"):
        read(freeze([1]))
    with pytest.raises(BadState, match="no state"):
        read(b"\x80\x04N.")
    node = next(each for each in world.log if isinstance(each.data, NodeRegistered))
    planted = frozen._replace(folds=tuple(e._replace(frozen=freeze((node, ()))) for e in frozen.folds))
    with pytest.raises(BadState):
        verified_from(planted, world.log)
