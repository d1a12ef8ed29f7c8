"""Is the record whole, and does what it says hang together? Read-only, over every row from the first.

Whole: every sequence has exactly one row, or lies in an accepted gap, or went with a day that the record says was dropped;
the chains lead from each row to the next and to the checkpoint, and had the sealed heads on the way; columns say what the
bytes say, and each source's numbers follow each other.
Hangs together: every received request has exactly one end, no attempt of it begins before the one before is over, epochs of
a node only rise, and every planned reconfiguration is committed or aborted once.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from services.ledger import database, reading, seals
from services.ledger.lives import EpochLives, RequestLives
from services.ledger.promises import Dropped, Published
from services.ledger.reading import LogInfo, LogRow
from services.ledger.records import CHAIN_ORIGIN, LOG_TABLES, Arrival, LogTable, Record, link, record

VIOLATIONS_KEPT_MAX = 100
"""More are counted, not kept."""


@dataclass(slots=True)
class Audit:
    """What was found. `open_requests` have no end (yet): of a record at rest, each is a violation too."""

    events: int = 0
    logs: int = 0
    accepted_gap_events: int = 0
    seals: int = 0
    dropped_rows: int = 0
    by_table: Counter[LogTable] = field(default_factory=Counter)
    by_type: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    by_end: Counter[str] = field(default_factory=Counter)
    open_requests: tuple[str, ...] = ()
    violation_count: int = 0
    violations: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.violation_count

    def violated(self, rule: str) -> None:
        """Note one violation."""
        self.violation_count += 1
        if len(self.violations) < VIOLATIONS_KEPT_MAX:
            self.violations.append(rule)


async def audit(database_url: str, *, settled: bool = False, progress: Callable[[int], None] | None = None) -> Audit:
    """Examine the record as of now. `settled`: nothing is under way any more, so an open request is a violation.
    `progress` is told how many events have been examined.

    Errors: those of `database.connect`.
    """
    async with database.whole_view(database_url) as connection:
        gone = Dropped(await seals.gone_days(connection))
        examiner = Examiner(Published(await seals.all_seals(connection)), gone)
        for log in await reading.logs(connection):
            examiner.begin(log)
            async for page in reading.pages(connection, log):
                for row in page:
                    examiner.row(row)
                if progress is not None:
                    progress(examiner.events)
            examiner.end()
        return examiner.verdict(settled)


class Examiner:
    """Is given every row in order. Pure."""

    def __init__(self, published: Published, dropped: Dropped) -> None:
        self._audit = Audit()
        self._seals = published
        self._dropped = dropped
        self._requests = RequestLives(self._audit.violated)
        self._epochs = EpochLives(self._audit.violated)
        self._heads: dict[LogTable, bytes] = dict.fromkeys(LOG_TABLES, CHAIN_ORIGIN)
        self._last_of: dict[str, tuple[int, int]] = {}
        self._breaks = 0
        """Accepted gaps and changes of log so far: a source's numbers may jump over one, and lives begin behind it."""
        self._holes = 0
        """Dropped rows so far, piece by piece: a source's numbers may jump over one, but every decision is there."""
        self._log: LogInfo | None = None
        self._next_seq = 1

    @property
    def events(self) -> int:
        """How many rows so far."""
        return self._audit.events

    def begin(self, log: LogInfo) -> None:
        """The rows of `log` follow."""
        previous = self._log
        if previous is not None:
            self._break()
            if log.predecessor != previous.log or log.predecessor_seq != previous.stream_seq:
                self._audit.violated(f"log {log.log}: says it follows {log.predecessor} at {log.predecessor_seq}")
        if log.begins is not None:
            # A part of another record: a seal within it says whether these heads are right.
            self._heads = dict(log.begins.heads)
            self._seals.hide(log.log, log.after_seq)
            self._break()
        self._log, self._next_seq = log, log.after_seq + 1
        self._audit.logs += 1
        self._epochs.begin_log()

    def row(self, row: LogRow) -> None:
        """The next row of the log."""
        self._audit.events += 1
        self._audit.by_table[row.table] += 1
        self._check_place(row)
        self._keep_promises(row.stream_seq)
        self._heads[row.table] = link(self._heads[row.table], row.raw)
        if row.chain != self._heads[row.table]:
            self._audit.violated(f"{self._name(row)}: the chain breaks here: this row or one before it was changed")
            self._heads[row.table] = row.chain
        told = record(Arrival(row.stream_seq, row.raw))
        if wrong := [name for name, value in row.columns.items() if getattr(told, name) != value]:
            self._audit.violated(f"{self._name(row)}: {', '.join(wrong)} differ from the bytes")
        if row.table == "repeats":
            return
        if row.table != told.table:
            self._audit.violated(f"{self._name(row)}: {told.type} belongs in {told.table}")
        self._audit.by_type[told.type] += 1
        self._check_source(row, told)
        if told.event is not None:
            self._requests.fold(told.event, bool(self._breaks))
            self._epochs.fold(told.event, bool(self._breaks))

    def end(self) -> None:
        """The rows of the log are over."""
        assert self._log is not None, "end() follows begin()"
        self._pass_gaps(self._log.stream_seq + 1)
        self._pass_dropped(self._log.stream_seq + 1)
        self._keep_promises(self._log.stream_seq + 1)
        if self._next_seq != self._log.stream_seq + 1:
            self._audit.violated(f"log {self._log.log}: rows end at {self._next_seq - 1}, not at the checkpoint")
        for table in LOG_TABLES:
            if self._heads[table] != self._log.heads[table]:
                self._audit.violated(
                    f"log {self._log.log}: the chain of {table} does not end where the checkpoint says"
                )

    def verdict(self, settled: bool) -> Audit:
        """Everything that was found."""
        found = self._audit
        found.requests, found.by_end = self._requests.received, self._requests.ends
        found.seals, found.dropped_rows = self._seals.checked, self._dropped.rows
        found.open_requests = tuple(sorted(self._requests.open))
        if settled:
            for request in found.open_requests:
                found.violated(f"request {request}: received and never ended")
        return found

    def _check_place(self, row: LogRow) -> None:
        if row.stream_seq < self._next_seq:
            self._audit.violated(f"{self._name(row)}: another row has this sequence")
            return
        self._pass_gaps(row.stream_seq)
        self._pass_dropped(row.stream_seq)
        if row.stream_seq != self._next_seq:
            self._audit.violated(f"{self._name(row)}: {self._next_seq} to {row.stream_seq - 1} are missing")
        self._next_seq = row.stream_seq + 1

    def _pass_gaps(self, to_seq: int) -> None:
        assert self._log is not None, "rows follow begin()"
        for first, last in self._log.gaps:
            if first == self._next_seq and last < to_seq:
                self._next_seq = last + 1
                self._audit.accepted_gap_events += last - first + 1
                self._break()

    def _pass_dropped(self, to_seq: int) -> None:
        assert self._log is not None, "rows follow begin()"
        if self._next_seq < to_seq and self._dropped.account(self._log.log, self._next_seq, to_seq - 1):
            self._next_seq = to_seq
            self._holes += 1

    def _keep_promises(self, seq: int) -> None:
        """Compare seals before `seq`, and go on behind rows that were dropped there."""
        assert self._log is not None, "rows follow begin()"
        log, violated = self._log.log, self._audit.violated
        for run in self._dropped.ended(log, seq, violated):
            self._seals.passed(log, run.from_seq, self._heads, violated)
            self._seals.hide(log, run.to_seq)
            self._heads["block_events"] = run.chain
        self._seals.passed(log, min(seq, self._dropped.begins(log)), self._heads, violated)

    def _break(self) -> None:
        self._breaks += 1

    def _check_source(self, row: LogRow, told: Record) -> None:
        if told.source is None or told.source_seq is None:
            return
        jumps = self._breaks + self._holes
        last, jumps_before = self._last_of.get(told.source, (told.source_seq - 1, jumps))
        self._last_of[told.source] = told.source_seq, jumps
        if told.source_seq <= last or (told.source_seq != last + 1 and jumps_before == jumps):
            self._audit.violated(f"{self._name(row)}: {told.source} numbers it {told.source_seq} after {last}")

    def _name(self, row: LogRow) -> str:
        assert self._log is not None, "rows follow begin()"
        return f"{row.table} {self._log.log}:{row.stream_seq}"
