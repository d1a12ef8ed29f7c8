"""The audit finds what is wrong, and says where."""

from collections.abc import Iterable
from datetime import timedelta
from uuid import UUID

import asyncpg
import pytest

from bench.ledger_traffic import Told, Traffic
from services.ledger import seals as seals_module
from services.ledger.audit import Audit, Examiner, audit
from services.ledger.database import driver_url, whole_view
from services.ledger.lives import EpochLives, RequestLives
from services.ledger.promises import Dropped, Published
from services.ledger.reading import LogInfo, LogRow
from services.ledger.records import CHAIN_ORIGIN, LOG_TABLES, Arrival, link, record
from services.ledger.seals import Extent, extent, runs, seal
from shared.contracts.envelope import EventData
from shared.contracts.events import (
    BlockDayDropped,
    EpochAborted,
    PrefillCompleted,
    ReconfigurationPlanned,
    RequestCancelled,
    RequestRedirected,
    RouterLost,
)
from shared.contracts.ids import NodeId, RequestId, WorkerId
from tests.services.ledger.conftest import Seals, story
from tests.services.ledger.record_writer import RecordWriter
from tests.support.story import Story, assigned, committed, completed, prefilled, received

W = WorkerId("n0/1/0")
R = RequestId("r")


def redirected(attempt: int) -> RequestRedirected:
    return RequestRedirected(request=R, attempt=attempt, worker=W, reason="full")


def violations(facts: Iterable[EventData], incomplete: bool = False) -> list[str]:
    found: list[str] = []
    requests, epochs = RequestLives(found.append), EpochLives(found.append)
    told = Story()
    told.tell(*facts)
    for each in told.events:
        requests.fold(each.event, incomplete)
        epochs.fold(each.event, incomplete)
    return found


GOOD_LIVES = {
    "completed": [received("r", 9), assigned("r", W, 9), prefilled("r", W, 9), completed("r", W, 1)],
    "redirected": [
        received("r", 9),
        assigned("r", W, 9),
        redirected(1),
        assigned("r", W, 9, attempt=2),
        completed("r", W, 1),
    ],
    "released twice, and the first attempt is told to be over last": [
        received("r", 9),
        assigned("r", W, 9),
        redirected(1),
        assigned("r", W, 9, attempt=2),
        redirected(2),
        prefilled("r", W, 9),
        assigned("r", W, 9, attempt=3),
        completed("r", W, 1),
    ],
    "lost after its first token": [
        received("r", 9),
        assigned("r", W, 9),
        prefilled("r", W, 9),
        assigned("r", W, 9, attempt=2),
        completed("r", W, 1),
    ],
    "router lost": [received("r", 9), assigned("r", W, 9), RouterLost(router="x", source="somebody-1-0000")],
    "received by a router that does not know yet that it was declared lost": [
        RouterLost(router="x", source="somebody-1-0000"),
        received("r", 9),
        assigned("r", W, 9),
        redirected(1),
        completed("r", W, 1),
    ],
    "prefilled after its end": [
        received("r", 9),
        assigned("r", W, 9),
        RequestCancelled(request=R),
        prefilled("r", W, 9),
    ],
    "epochs": [committed(epoch=1), committed(epoch=3), committed("n1", epoch=1)],
}

BAD_LIVES = {
    "received twice": [received("r", 9), received("r", 9)],
    "although it had ended": [received("r", 9), RequestCancelled(request=R), completed("r", W, 1)],
    "never received": [completed("r", W, 1)],
    "although it is not open": [received("r", 9), RequestCancelled(request=R), assigned("r", W, 9)],
    "follows attempt 0": [received("r", 9), assigned("r", W, 9, attempt=2)],
    "was not released": [received("r", 9), assigned("r", W, 9), assigned("r", W, 9, attempt=2)],
    "committed after 2": [committed(epoch=2), committed(epoch=2)],
}


@pytest.mark.parametrize("name", GOOD_LIVES)
def test_a_good_life_is_no_violation(name: str) -> None:
    assert violations(GOOD_LIVES[name]) == []


@pytest.mark.parametrize("rule", BAD_LIVES)
def test_a_bad_life_is_a_violation(rule: str) -> None:
    found = violations(BAD_LIVES[rule])
    assert len(found) == 1, found
    assert rule in found[0]


def test_what_a_lost_router_receives_has_ended() -> None:
    lives, told = RequestLives(pytest.fail), Story()
    told.tell(RouterLost(router="x", source="somebody-1-0000"), received("r", 9), assigned("r", W, 9))
    for each in told.events:
        lives.fold(each.event, incomplete=False)
    assert (lives.received, dict(lives.ends), lives.open) == (1, {"router-lost": 1}, {})


def test_after_a_gap_a_life_may_begin_in_the_middle() -> None:
    middle = [assigned("r", W, 9, attempt=2), completed("r", W, 1)]
    assert violations(middle, incomplete=True) == []


def planned(epoch: int) -> ReconfigurationPlanned:
    return ReconfigurationPlanned(
        node=NodeId("n0"),
        epoch=epoch,
        policy="paper",
        reason="",
        old_composition=(8,),
        new_composition=(4, 4),
        retiring=(),
        coming=(),
    )


def test_a_reconfiguration_ends_once() -> None:
    aborted = EpochAborted(node=NodeId("n0"), epoch=1, step="planned", reason="")
    assert violations([planned(1), aborted, planned(2), committed(epoch=2)]) == []
    assert "under way" in violations([planned(1), planned(2)])[0]
    assert "without being planned" in violations([planned(1), aborted, aborted])[0]


def test_a_node_may_begin_again_in_a_new_log() -> None:
    found: list[str] = []
    epochs, told = EpochLives(found.append), Story()
    told.tell(committed(epoch=2), planned(3), committed(epoch=1), planned(2))
    for each in told.events[:2]:
        epochs.fold(each.event, incomplete=False)
    epochs.begin_log()
    for each in told.events[2:]:
        epochs.fold(each.event, incomplete=True)
    assert found == []


async def test_a_whole_record_is_clean(writer: RecordWriter, seals: Seals) -> None:
    arrivals = story(seals, 60)
    await writer.write(arrivals[:200])
    await writer.write([*arrivals[200:], seals.arrival(b"no event"), seals.arrival(arrivals[3].raw)])
    found = await audit(writer.url, settled=True)
    assert found.clean, found.violations
    assert found.events == len(arrivals) + 2
    assert (found.by_table["repeats"], found.by_type["unreadable"]) == (1, 1)
    assert found.requests == 60 == sum(found.by_end.values())


async def test_an_open_request_is_told_and_a_violation_only_of_a_record_at_rest(
    writer: RecordWriter, seals: Seals
) -> None:
    await writer.write(seals.arrivals([Told("router", received("r", 9), "r")]))
    found = await audit(writer.url)
    assert (found.clean, found.open_requests) == (True, ("r",))
    assert not (await audit(writer.url, settled=True)).clean


async def test_a_gap_that_is_accepted_and_not_yet_passed_is_no_violation(writer: RecordWriter, seals: Seals) -> None:
    await writer.write(story(seals, 3))
    log, last = writer.checkpoint.log, writer.checkpoint.stream_seq
    accepted = "INSERT INTO gaps (log, from_seq, to_seq, accepted_by, reason) VALUES ($1, $2, $3, 'ann', 'a full disk')"
    await writer.connection.execute(accepted, log, last + 1, last + 10)
    found = await audit(writer.url)
    assert (found.violations, found.accepted_gap_events) == ([], 0)


def examined(*logs: tuple[LogInfo, list[Arrival]]) -> list[str]:
    """The violations in logs whose chains go on from one to the next."""
    heads, examiner = dict.fromkeys(LOG_TABLES, CHAIN_ORIGIN), Examiner(Published([]), Dropped([]))
    for log, arrivals in logs:
        examiner.begin(log._replace(heads=heads, stream_seq=len(arrivals)))
        for arrival in arrivals:
            table = record(arrival).table
            heads[table] = link(heads[table], arrival.raw)
            examiner.row(LogRow(table, arrival.stream_seq, arrival.raw, heads[table], {}))
        examiner.end()
    return examiner.verdict(settled=False).violations


def test_a_source_numbers_without_gaps(seals: Seals) -> None:
    first, second, third = seals.arrivals([Told("router", received(name, 9), name) for name in "abc"])
    log = LogInfo(UUID(int=1), 1, None, None, 0, {}, ())
    assert examined((log, [first, second, third])) == []
    [found] = examined((log, [first, Arrival(2, third.raw)]))
    assert "router-1-0 numbers it 3 after 1" in found


def test_a_log_says_what_it_follows_and_numbers_may_jump_between_logs(seals: Seals) -> None:
    first, _, third = seals.arrivals([Told("router", received(name, 9), name) for name in "abc"])
    log, other = UUID(int=1), UUID(int=2)
    earlier = LogInfo(log, 1, None, None, 0, {}, ())
    later = LogInfo(other, 2, log, 1, 0, {}, ())
    rest = [Arrival(1, third.raw)]
    assert examined((earlier, [first]), (later, rest)) == []
    for wrong in (later._replace(predecessor=other), later._replace(predecessor_seq=7)):
        [found] = examined((earlier, [first]), (wrong, rest))
        assert "says it follows" in found


TAMPERINGS = {
    "raw = raw || 'x' WHERE stream_seq = 50": ["decisions", ":50", "chain breaks"],
    "stream_seq = 100000 WHERE stream_seq = 50": [":51", "50 to 50 are missing"],
    "type = 'frozen' WHERE stream_seq = 50": [":50", "type differ"],
    "time_ns = time_ns + 1 WHERE stream_seq = 50": [":50", "time_ns differ"],
    "source = 'somebody-else' WHERE stream_seq = 50": [":50", "source differ"],
    "chain = decode(repeat('00', 32), 'hex') WHERE stream_seq = 50": [":50", "chain breaks"],
}


@pytest.mark.parametrize("change", TAMPERINGS)
async def test_the_owner_changes_a_row(writer: RecordWriter, seals: Seals, change: str) -> None:
    found = await tampered(writer, seals, f"UPDATE decisions SET {change}")
    assert all(part in found.violations[0] for part in TAMPERINGS[change]), found.violations
    assert sum("chain breaks" in each for each in found.violations) <= 2, "the rows behind are not blamed"


async def test_the_owner_removes_a_row(writer: RecordWriter, seals: Seals) -> None:
    found = await tampered(writer, seals, "DELETE FROM decisions WHERE stream_seq = 50")
    assert "50 to 50 are missing" in found.violations[0]
    assert any("chain breaks" in each for each in found.violations)


async def test_the_owner_removes_the_last_rows_and_winds_back_the_checkpoint(
    writer: RecordWriter, seals: Seals
) -> None:
    """The heads in the checkpoint tell; once they are published in `log-sealed`, forging those does not help either."""
    found = await tampered(
        writer,
        seals,
        "DELETE FROM decisions WHERE stream_seq > 60; UPDATE checkpoints SET stream_seq = 60",
        blocks_from=61,
    )
    assert any("does not end where the checkpoint says" in each for each in found.violations)


async def tampered(writer: RecordWriter, seals: Seals, statement: str, blocks_from: int | None = None) -> Audit:
    await writer.write(story(seals, 30))
    owner = await asyncpg.connect(driver_url(writer.url))
    # As somebody would who owns the server: the trigger keeps only the honest from mistakes.
    await owner.execute("SET session_replication_role = replica")
    await owner.execute(statement)
    if blocks_from is not None:
        await owner.execute("DELETE FROM block_events WHERE stream_seq >= $1", blocks_from)
    await owner.close()
    found = await audit(writer.url)
    assert not found.clean
    return found


def test_a_prefill_of_another_request_releases_nothing() -> None:
    other = PrefillCompleted.model_validate(prefilled("other", W, 9).model_dump())
    found = violations([received("r", 9), assigned("r", W, 9), other, assigned("r", W, 9, attempt=2)])
    assert "was not released" in found[0]


class Sealed:
    """A record of two days' block events, one of them old, that is sealed and whose old day is to go."""

    def __init__(self, writer: RecordWriter, seals: Seals) -> None:
        self.writer, self.seals = writer, seals

    async def write(self) -> None:
        arrivals = story(self.seals, 40)
        self.day = next(row.day for each in arrivals if (row := record(each)).table == "block_events")
        owner = await asyncpg.connect(driver_url(self.writer.url))
        partition = f"block_events_{self.day:%Y%m%d} PARTITION OF block_events"
        await owner.execute(f"CREATE TABLE {partition} FOR VALUES FROM ('{self.day}') TO ('{self.day + timedelta(1)}')")
        await owner.close()
        await self.writer.write(arrivals)
        await self.say(await seal(self.writer.connection, await self.reached()))

    async def reached(self) -> Extent:
        found = await extent(self.writer.connection)
        assert found is not None
        return found

    async def say(self, fact: EventData) -> None:
        await self.writer.write(self.seals.arrivals([Told("controller", fact)]))

    async def said_to_go(self) -> BlockDayDropped:
        gone = await runs(self.writer.connection, self.day, await self.reached())
        assert gone is not None
        return BlockDayDropped(day=self.day.isoformat(), kept_days=30, runs=tuple(gone))

    async def drop(self) -> None:
        await self.writer.connection.execute("SELECT drop_block_day($1)", self.day)


async def test_a_sealed_day_goes_as_a_whole_and_the_record_stays_whole(writer: RecordWriter, seals: Seals) -> None:
    record_ = Sealed(writer, seals)
    await record_.write()
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="no decision of the record drops"):
        await record_.drop()
    gone = await record_.said_to_go()
    await record_.say(gone)
    found = await audit(writer.url)
    assert (found.violations, found.seals, found.dropped_rows) == ([], 1, 0), "said, and not done yet"
    await record_.drop()
    found = await audit(writer.url)
    assert found.violations == []
    assert found.dropped_rows == sum(run.rows for run in gone.runs) > 20
    assert found.by_table["block_events"] == 0
    # The chain goes on behind what is gone.
    traffic = Traffic(9, "later")
    await writer.write(seals.arrivals(told for _ in range(3) for told in traffic.request()))
    await record_.say(await seal(writer.connection, await record_.reached()))
    found = await audit(writer.url)
    assert (found.violations, found.seals) == ([], 2)


async def test_a_day_stays_for_as_long_as_an_audit_looks_at_the_record(writer: RecordWriter, seals: Seals) -> None:
    """From its first question on, whatever that was about: dropped rows are gone from older views as well."""
    record_ = Sealed(writer, seals)
    await record_.write()
    await record_.say(await record_.said_to_go())
    async with whole_view(writer.url) as looking:
        assert await looking.fetchval("SELECT count(*) FROM logs") == 1
        with pytest.raises(asyncpg.LockNotAvailableError):
            await record_.drop()
        assert await looking.fetchval("SELECT count(*) FROM block_events") > 20
    await record_.drop()


async def test_a_day_that_is_not_sealed_or_lies_in_too_many_pieces_stays(
    writer: RecordWriter, seals: Seals, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_ = Sealed(writer, seals)
    await record_.write()
    reached = await record_.reached()
    assert await runs(writer.connection, record_.day, reached._replace(sealed_seq=reached.sealed_seq // 2)) is None
    monkeypatch.setattr(seals_module, "RUNS_MAX", 0)
    assert await runs(writer.connection, record_.day, reached) is None


async def test_a_day_that_went_without_a_word_is_missing(writer: RecordWriter, seals: Seals) -> None:
    record_ = Sealed(writer, seals)
    await record_.write()
    owner = await asyncpg.connect(driver_url(writer.url))
    await owner.execute(f"DROP TABLE block_events_{record_.day:%Y%m%d}")
    await owner.close()
    assert "are missing" in (await audit(writer.url)).violations[0]


async def test_a_decision_that_is_removed_among_dropped_rows_is_missed(writer: RecordWriter, seals: Seals) -> None:
    record_ = Sealed(writer, seals)
    await record_.write()
    await record_.say(await record_.said_to_go())
    await record_.drop()
    owner = await asyncpg.connect(driver_url(writer.url))
    await owner.execute("SET session_replication_role = replica")
    seqs = [row["stream_seq"] for row in await owner.fetch("SELECT stream_seq FROM decisions ORDER BY 1")]
    await owner.execute("DELETE FROM decisions WHERE stream_seq = $1", seqs[100])
    await owner.close()
    found = await audit(writer.url)
    assert any(f":{seqs[101]}: the chain breaks" in each for each in found.violations)
    assert any("went by policy" in each for each in found.violations)


async def test_a_record_that_was_written_anew_is_not_the_one_that_was_sealed(
    writer: RecordWriter, seals: Seals
) -> None:
    """Whoever owns the server can make rows, chains and checkpoint agree again. The published head he cannot."""
    record_ = Sealed(writer, seals)
    await record_.write()
    owner = await asyncpg.connect(driver_url(writer.url))
    await owner.execute("SET session_replication_role = replica")
    raws = await owner.fetch("SELECT stream_seq, raw FROM decisions ORDER BY stream_seq")
    head = CHAIN_ORIGIN
    for row in raws:
        raw = row["raw"].replace(b'"queue_us":1000', b'"queue_us":1001') if row["stream_seq"] < 100 else row["raw"]
        head = link(head, raw)
        await owner.execute(
            "UPDATE decisions SET raw = $2, chain = $3 WHERE stream_seq = $1", row["stream_seq"], raw, head
        )
    await owner.execute("UPDATE checkpoints SET decisions_head = $1", head)
    await owner.close()
    [found] = (await audit(writer.url)).violations
    assert "is not what is there" in found


async def test_two_rows_that_changed_places_are_found(writer: RecordWriter, seals: Seals) -> None:
    found = await tampered(
        writer,
        seals,
        "UPDATE decisions SET stream_seq = 1000000 WHERE stream_seq = 50; "
        "UPDATE decisions SET stream_seq = 50 WHERE stream_seq = 51; "
        "UPDATE decisions SET stream_seq = 51 WHERE stream_seq = 1000000",
    )
    assert ":50" in found.violations[0]
    assert "chain breaks" in found.violations[0]


async def test_a_changed_block_event_is_found(writer: RecordWriter, seals: Seals) -> None:
    await writer.write(story(seals, 30))
    owner = await asyncpg.connect(driver_url(writer.url))
    await owner.execute("SET session_replication_role = replica")
    seq = await owner.fetchval("SELECT min(stream_seq) FROM block_events")
    await owner.execute("UPDATE block_events SET raw = raw || ' ' WHERE stream_seq = $1", seq)
    await owner.close()
    found = await audit(writer.url)
    assert found.violations[0].startswith("block_events")
    assert f":{seq}: the chain breaks" in found.violations[0]
