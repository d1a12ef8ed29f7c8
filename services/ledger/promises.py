"""What the record has promised of itself, for the audit: seals that were published, and rows that went by policy. Pure."""

from collections.abc import Callable, Iterable, Mapping
from uuid import UUID

from services.ledger.records import BIGINT_MAX, LogTable
from services.ledger.seals import head
from shared.contracts.events import BlockDayDropped, DroppedRun, LogSealed

Violated = Callable[[str], None]


class Dropped:
    """Runs of block events that are gone with their days, log by log and in the chain's order.

    Every row that is missing has to be accounted for: each run says how many it had, and from where the chain goes on.
    """

    def __init__(self, days: Iterable[BlockDayDropped]) -> None:
        self.rows = 0
        self._missed = 0
        self._runs: dict[str, list[DroppedRun]] = {}
        for run in (run for day in days for run in day.runs):
            self._runs.setdefault(run.log, []).append(run)
        for runs in self._runs.values():
            runs.sort(key=lambda run: run.from_seq, reverse=True)

    def account(self, log: UUID, first: int, last: int) -> bool:
        """Whether all of the missing sequences from `first` to `last` lie in runs."""
        accounted = 0
        for run in reversed(self._runs.get(str(log), [])):
            if run.from_seq > last:
                break
            accounted += max(0, min(run.to_seq, last) - max(run.from_seq, first) + 1)
        self._missed += accounted
        return accounted == last - first + 1

    def begins(self, log: UUID) -> int:
        """Where the next run begins, behind everything if there is none: from there on the chain's head is not known."""
        runs = self._runs.get(str(log), [])
        return runs[-1].from_seq if runs else BIGINT_MAX

    def ended(self, log: UUID, seq: int, violated: Violated) -> list[DroppedRun]:
        """The runs that end before `seq` and have not been told yet."""
        runs, ended = self._runs.get(str(log), []), []
        while runs and runs[-1].to_seq < seq:
            ended.append(runs.pop())
            self.rows += ended[-1].rows
        if ended and self._missed != (went := sum(run.rows for run in ended)):
            violated(
                f"log {log}: {self._missed} rows are missing between {ended[0].from_seq} and {ended[-1].to_seq}, "
                f"where {went} went by policy"
            )
        if ended:
            self._missed = 0
        return ended


class Published:
    """Published seals, compared as the audit passes them."""

    def __init__(self, published: Iterable[LogSealed]) -> None:
        self.checked = 0
        self._open: dict[str, list[LogSealed]] = {}
        for each in published:
            self._open.setdefault(each.sealed_log, []).append(each)
        for seals in self._open.values():
            seals.sort(key=lambda seal: seal.to_seq, reverse=True)

    def passed(self, log: UUID, seq: int, heads: Mapping[LogTable, bytes], violated: Violated) -> None:
        """Every row before `seq` was seen, and `heads` are the chains' heads there."""
        for seal in self._before(log, seq):
            self.checked += 1
            if seal.head != head(heads):
                violated(
                    f"log {log}: what was sealed up to {seal.to_seq} is not what is there, from {seal.from_seq} on"
                )

    def hide(self, log: UUID, seq: int) -> None:
        """Seals before `seq` cannot be compared: rows around them went by policy. The next seal covers them."""
        self._before(log, seq)

    def _before(self, log: UUID, seq: int) -> list[LogSealed]:
        seals, before = self._open.get(str(log), []), []
        while seals and seals[-1].to_seq < seq:
            before.append(seals.pop())
        return before
