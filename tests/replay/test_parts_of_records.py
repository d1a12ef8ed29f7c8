"""A piece out of the middle of a record, in another database: whatever is asked of it has the answers of the whole."""

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from replay.freezing import EARLIER
from replay.instants import Instant, Nothing, states
from replay.keeping import beginning, check
from replay.verification import verify
from replay.verifying import Span
from services.ledger import partial, snapshots
from services.ledger.audit import audit
from services.ledger.bundles import (
    BadBundle,
    BundleReader,
    BundleWriter,
    Frame,
    LogBegins,
    SnapshotRow,
    StatePiece,
)
from services.ledger.exporting import Begins, NotExported, export
from services.ledger.importing import import_bundle
from services.ledger.logbook import OtherPool
from services.ledger.patches import Place
from services.ledger.rebuild import rebuild
from services.ledger.records import BIGINT_MAX
from services.ledger.seals import extent, seal
from shared.runtime.states import freeze, thaw
from tests.replay.conftest import arrivals
from tests.replay.lagging_world import Process, World
from tests.services.ledger.record_writer import RecordWriter, tables


class Sealing:
    """A world whose log is recorded and sealed as the ledger does it."""

    def __init__(self, writer: RecordWriter, world: World) -> None:
        self.writer, self.world = writer, world
        self._ledger = Process("ledger-1", None, None)
        self._written = 0

    async def write(self) -> None:
        await self.writer.write(arrivals(self.world.log[self._written :], self._written + 1))
        self._written = len(self.world.log)

    async def seal(self) -> int:
        """Where it was sealed."""
        await self.write()
        connection = self.writer.connection
        async with connection.transaction(isolation="repeatable_read"):
            reached = await extent(connection)
            assert reached is not None
            place = await snapshots.take(connection, reached, BIGINT_MAX)
            sealed = await seal(connection, reached, await snapshots.digest(connection, place))
        self.world.store(self.world.seal(self._ledger, sealed))
        await self.write()
        return place.seq


async def record(writer: RecordWriter, seed: int = 1) -> list[int]:
    """A life with three seals; where they are."""
    world = World(seed, policy="vertumnus")
    sealing, sealed = Sealing(writer, world), []
    for steps in (300, 300, 200):
        world.run(steps)
        sealed.append(await sealing.seal())
    world.lose_node("n1", 1)
    world.run(500)
    await sealing.write()
    return sealed


async def part(url: str, from_seq: int, to_seq: int = BIGINT_MAX) -> bytes:
    place, deciders = await beginning(url, Span(from_seq=from_seq))
    file = io.BytesIO()
    await export(url, file, to_seq=to_seq, begins=Begins(place, deciders))
    return file.getvalue()


async def vertumnus(url: str, *arguments: str, status: int = 0) -> str:
    runner = CliRunner(env={"VERTUMNUS_DATABASE_URL": url, "COLUMNS": "200"})
    result = await asyncio.to_thread(runner.invoke, app, list(arguments))
    assert result.exit_code == status, result.output
    return result.output


async def test_a_part_has_the_answers_of_the_whole(writer: RecordWriter, elsewhere: str, tmp_path: Path) -> None:
    """By the commands, as an engineer on another machine uses them."""
    _, second, _ = await record(writer)
    file = str(tmp_path / "incident")
    told = await vertumnus(writer.url, "ledger", "export", file, "--from", str(second + 5))
    assert f"behind {second:,}" in told
    await vertumnus(elsewhere, "ledger", "import", file)
    await vertumnus(elsewhere, "verify", "--chain")
    there, here = await verify(elsewhere), await verify(writer.url, Span(from_seq=second + 1))
    assert (there.findings.differences, there.begun_seq) == ([], second)
    assert {reason for _, reason in there.findings.skipped} <= {EARLIER}
    for kind, number in here.findings.checked.items():
        assert there.findings.checked[kind] + there.findings.skipped[kind, EARLIER] == number, kind
    last = writer.checkpoint.stream_seq
    asked = [Instant(each, True) for each in (second, second + 1, (second + last) // 2, last)]
    for one, other in zip(await states(elsewhere, asked), await states(writer.url, asked), strict=True):
        for state in (one, other):
            del state["folded_from"], state["place"]["time_ns"]
        assert one == other
    names = [row["request"] for row in await writer.connection.fetch(PLACED_LATE, last - 200)]
    assert len(names) > 5
    for name in names[:4]:
        one, other = [
            json.loads(await vertumnus(url, "explain", name, "--all", "--json")) for url in (elsewhere, writer.url)
        ]
        assert one == other
    simulated = [
        json.loads(
            await vertumnus(
                url, "what-if", "--set", "lam_vertumnus=0", "--seeds", "1", "--from", str(second + 1), "--json"
            )
        )
        for url in (elsewhere, writer.url)
    ]
    assert simulated[0]["recorded"] == simulated[1]["recorded"]


PLACED_LATE = "SELECT request FROM requests WHERE received_seq > $1 AND worker IS NOT NULL ORDER BY received_seq"


async def test_a_part_can_be_rebuilt_exported_again_and_copied_into_by_nobody(
    writer: RecordWriter, elsewhere: str
) -> None:
    first, *_ = await record(writer)
    whole = await part(writer.url, first + 1)
    await import_bundle(elsewhere, io.BytesIO(whole), check=check)
    there = RecordWriter(elsewhere)
    with pytest.raises(OtherPool, match="a part of a record"):
        await there.restart()
    live = await tables(there.connection)
    assert {row["request"] for row in live["requests"]} <= {
        row["request"] for row in (await tables(writer.connection))["requests"]
    }
    for table in ("nodes", "workers", "caches", "cached_runs", "sources"):
        assert live[table] == (await tables(writer.connection))[table], table
    await rebuild(elsewhere)
    assert await tables(there.connection) == live
    file = io.BytesIO()
    await export(elsewhere, file)
    assert file.getvalue() == whole, "its beginning goes with it"
    assert (await audit(elsewhere)).violations == []
    await there.close()
    with pytest.raises(Nothing, match=f"covers .*:{first + 1} to"):
        await states(elsewhere, [Instant(first - 1, True)])
    with pytest.raises(Nothing):
        await states(elsewhere, [Instant(1, False)])


async def test_a_range_without_its_seal_is_refused(writer: RecordWriter) -> None:
    first, second, third = await record(writer)
    told = await vertumnus(writer.url, "ledger", "export", "x", "--from", str(first), status=1)
    assert f"no sealed state lies before the range: the oldest is that at {writer.checkpoint.log}:{first}" in told
    place, deciders = await beginning(writer.url, Span(from_seq=third + 1))
    for to_seq, why in ((third, "ends before"), (second, "ends before")):
        with pytest.raises(NotExported, match=why):
            await export(writer.url, io.BytesIO(), to_seq=to_seq, begins=Begins(place, deciders))
    with pytest.raises(NotExported, match="is not in the range"):
        await export(writer.url, io.BytesIO(), begins=Begins(Place(1, third - 1), deciders))
    await writer.connection.execute("DELETE FROM snapshots")
    assert "there is none" in await vertumnus(writer.url, "ledger", "export", "x", "--from", str(third + 9), status=1)


def changed(whole: bytes, change: Callable[[list[Frame]], None]) -> bytes:
    reader = BundleReader(io.BytesIO(whole))
    frames = list(reader.frames())[:-1]
    change(frames)
    file = io.BytesIO()
    writing = BundleWriter(file, reader.header)
    for each in frames:
        writing.tell(each)
    writing.close()
    return file.getvalue()


def replaced(kind: type[Any], change: Callable[[Any], Any]) -> Callable[[list[Frame]], None]:
    def changing(frames: list[Frame]) -> None:
        at = next(n for n, each in enumerate(frames) if isinstance(each, kind) and change(each) != each)
        frames[at] = change(frames[at])

    return changing


def other_parameters(piece: StatePiece) -> StatePiece:
    if piece.of == "deciders":
        return piece
    models = thaw(piece.content, partial.PACKAGES)
    models.parameters = models.parameters.model_copy(update={"lam": 7.0})
    return piece.model_copy(update={"content": freeze(models)})


def fewer_blocks(piece: StatePiece) -> StatePiece:
    if piece.of == "deciders":
        return piece
    models = thaw(piece.content, partial.PACKAGES)
    for held in models.holders.workers.values():
        held.number += 1
    return piece.model_copy(update={"content": freeze(models)})


def without_snapshot(frames: list[Frame]) -> None:
    frames[:] = [each for each in frames if not isinstance(each, SnapshotRow)]


def moved(begins: LogBegins) -> LogBegins:
    part = begins.begins
    return begins if part is None else begins.model_copy(update={"begins": part.model_copy(update={"stream_seq": 5})})


CHANGES: dict[str, Callable[[list[Frame]], None]] = {
    "caches is not what the snapshot says": replaced(StatePiece, fewer_blocks),
    "parameters is not what": replaced(StatePiece, other_parameters),
    "nodes is not what the snapshot says": without_snapshot,
    "no state": replaced(StatePiece, lambda piece: piece.model_copy(update={"content": b"cos\nsystem\n."})),
    "a state lies where no log begins": lambda frames: frames.append(
        next(f for f in frames if isinstance(f, StatePiece))
    ),
    "had folded up to": replaced(LogBegins, moved),
}


@pytest.mark.parametrize("rule", CHANGES)
async def test_a_changed_beginning_is_refused(writer: RecordWriter, elsewhere: str, rule: str) -> None:
    first, _, third = await record(writer)
    whole = await part(writer.url, first + 1, third)
    with pytest.raises(BadBundle, match=rule):
        await import_bundle(elsewhere, io.BytesIO(changed(whole, CHANGES[rule])), check=check)


async def test_what_no_seal_vouches_for_is_refused(writer: RecordWriter, elsewhere: str) -> None:
    first, _, third = await record(writer)
    whole = await part(writer.url, first + 1, third)
    later = replaced(
        SnapshotRow, lambda row: row.model_copy(update={"model": "unheard-of"}) if "open" in row.model else row
    )
    with pytest.raises(BadBundle, match=r"open_requests is not|is not the snapshot"):
        await import_bundle(elsewhere, io.BytesIO(changed(whole, later)), check=check)
    extra = lambda frames: frames.insert(1, SnapshotRow(model="unheard-of", value="{}"))  # noqa: E731
    with pytest.raises(BadBundle, match=r"sealed at .* is not the snapshot"):
        await import_bundle(elsewhere, io.BytesIO(changed(whole, extra)), check=check)


async def test_a_range_begins_at_a_kept_state(writer: RecordWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.keeping.RUN_UP_EVENTS", 250)
    *_, third = await record(writer)
    assert (await verify(writer.url, keep=True)).kept is not None
    told = json.loads(await vertumnus(writer.url, "verify", "--from", str(third + 260), "--json"))
    assert told["begun_seq"] == third
    assert told["skipped"] == []
    monkeypatch.setattr("replay.keeping.before", lambda *_: nothing())
    whole = json.loads(await vertumnus(writer.url, "verify", "--from", str(third + 260), "--json"))
    assert {**whole, "begun_seq": third, "events": told["events"]} == told
    assert whole["begun_seq"] == 0


async def nothing() -> None:
    return None
