"""The work at every worker as columns, kept up with the folds: what `lines.Load` says of one worker, said of all at once.

A decision asks about every worker and changes one. So the folds name the workers whose load has changed (`Loads.touched`), and
`look` writes those rows anew; the rest is as it was. What time alone changes is reckoned with when it is asked for
(`loops.ahead`), but who has waited too long stands in the columns, which say until when they hold.

Array names end in their axes: C columns of `loops.py`, W workers, N places in a line.
"""

from typing import NamedTuple

import numpy as np

from services.router import loops
from services.router.lines import FOREVER, HUNG_FACTOR, HUNG_US_MIN, Load
from services.router.loads import Loads
from services.router.loops import DEGREE, FROM_NS, HUNG_NS, LINE_COLUMNS, RATIO_PPM, SIGN_NS, UNTIL_NS, WAITING_US
from services.router.roster import Bools, Roster, members
from shared.contracts.ids import WorkerId
from shared.model.calibration import PPM, Calibration
from shared.model.cost import Ints
from shared.model.pool import Pool


class Lines(NamedTuple):
    """What `loops.ahead` reads. Waiting work is sorted in `works_NW`; `sums_NW` says how much the first so many of a line are.
    Those who have waited too long are ahead of every newcomer, and only in `LATE_US`. Of the running prompts that are done in
    chunks `chunks_2NW` has what is left, and the chunk."""

    line_CW: Ints
    works_NW: Ints
    sums_NW: Ints
    chunks_2NW: Ints

    @classmethod
    def empty(cls, roster: Roster) -> "Lines":
        """Nobody has anything to do."""
        workers = len(roster.workers)
        line_CW = np.zeros((LINE_COLUMNS, workers), dtype=np.int64)
        line_CW[DEGREE], line_CW[RATIO_PPM] = roster.degree_W, PPM
        line_CW[[SIGN_NS, UNTIL_NS, HUNG_NS]], line_CW[FROM_NS] = FOREVER, -FOREVER
        nobody_NW = np.zeros((0, workers), dtype=np.int64)
        return cls(line_CW, nobody_NW, np.zeros((1, workers), dtype=np.int64), nobody_NW[None].repeat(2, axis=0))


class Board:
    """`look` before anything else is asked. Of a copy nothing is known, so that it looks for itself."""

    def __init__(self) -> None:
        self.members = members(Pool(), {})
        self._changes = -1
        self._lines = _Lines(self.members.roster)

    def __deepcopy__(self, _: object) -> "Board":
        return Board()

    def forget(self) -> None:
        """Read every row anew at the next look."""
        self._changes = -1

    def look(self, pool: Pool, loads: Loads, calibration: Calibration, now_ns: int) -> None:
        """Bring the columns up to date."""
        if self._changes != pool.changes:
            self.members, self._changes = members(pool, loads.specs), pool.changes
            self._lines = _Lines(self.members.roster)
            loads.touched.clear()
            loads.touched.update(loads.of_worker, calibration.times)
        if loads.touched:
            self._lines.write(loads, calibration, loads.touched, now_ns)
            loads.touched.clear()
        self._lines.age(loads, now_ns)

    # --- questions

    @property
    def roster(self) -> Roster:
        return self.members.roster

    @property
    def lines(self) -> Lines:
        return self._lines.columns

    def hung(self, now_ns: int) -> Bools | None:
        """Who has given no sign for too long; None if nobody."""
        hung_W: Bools | None = self.lines.line_CW[HUNG_NS] <= now_ns if self._lines.hung_ns <= now_ns else None
        return hung_W

    def check(self, pool: Pool, loads: Loads, calibration: Calibration) -> None:
        """The columns say what the folds say of each worker that has not been touched since."""
        if self._changes != pool.changes:
            return
        now_ns = max(self._lines.from_ns, 0)
        for row, worker in enumerate(self.roster.workers):
            if worker in loads.touched:
                continue
            load = loads.of_worker.get(worker) or Load()
            queue_us, _ = loops.ahead(row, 0, False, now_ns, *self.lines)
            assert load.at(now_ns) == (queue_us, self.lines.line_CW[HUNG_NS, row] <= now_ns), (
                f"{worker} has another load"
            )
            for work_us in (0, 300_000, FOREVER - 1):
                found = loops.ahead(row, work_us, True, now_ns, *self.lines)
                assert load.ahead(work_us, now_ns) == found, f"{worker} has another line"
            assert self.lines.line_CW[RATIO_PPM, row] == calibration.ratio_ppm(worker), f"{worker} has another ratio"


class _Lines:
    """The columns, and until when they hold."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._idle = Load()
        self.columns = Lines.empty(roster)
        self.hung_ns, self.from_ns, self._until_ns = FOREVER, -FOREVER, FOREVER

    def write(self, loads: Loads, calibration: Calibration, touched: set[WorkerId], now_ns: int) -> None:
        """These workers' rows."""
        rows = self._roster.rows
        for worker in touched:
            if (row := rows.get(worker)) is not None:
                self._write(row, loads.of_worker.get(worker, self._idle), now_ns)
                self.columns.line_CW[RATIO_PPM, row] = calibration.ratio_ppm(worker)
        self._sum_up()

    def age(self, loads: Loads, now_ns: int) -> None:
        """Write again the rows where somebody more, or fewer if the clock was set back, has waited too long."""
        if self.from_ns <= now_ns < self._until_ns:
            return
        line_CW = self.columns.line_CW
        for row in np.flatnonzero((now_ns < line_CW[FROM_NS]) | (line_CW[UNTIL_NS] <= now_ns)).tolist():
            self._write(row, loads.of_worker[self._roster.workers[row]], now_ns)
        self._sum_up()

    def _sum_up(self) -> None:
        if not self._roster.workers:
            return
        from_ns_W, until_ns_W, hung_ns_W = self.columns.line_CW[FROM_NS:]
        # Of a few dozen, a search for its place takes a fifth of the time of `min`.
        self.from_ns, self._until_ns = int(from_ns_W[from_ns_W.argmax()]), int(until_ns_W[until_ns_W.argmin()])
        self.hung_ns = int(hung_ns_W[hung_ns_W.argmin()])

    def _write(self, row: int, load: Load, now_ns: int) -> None:
        line = load.line.as_of(now_ns)
        waiting, running = len(line.works), load.running.values()
        chunks = [(each.left_us, each.chunk_us) for each in running if each.chunk_us < each.left_us]
        self._make_room(waiting, len(chunks))
        line_CW, works_NW, sums_NW, chunks_2NW = self.columns
        if waiting:
            works_NW[:waiting, row], sums_NW[: waiting + 1, row] = line.works, line.sums
        if chunks:
            chunks_2NW[:, : len(chunks), row] = np.transpose(chunks)
        sign_ns = hung_ns = FOREVER
        left_us = sum(each.left_us for each in running)
        if load.sign_ns is not None:
            sign_ns, hung_ns = load.sign_ns, load.sign_ns + (max(HUNG_FACTOR * left_us, HUNG_US_MIN) + 1) * 1_000
        total_us = load.line.total_us
        line_CW[WAITING_US:, row] = (
            total_us, total_us - line.sums[-1], waiting, left_us, sign_ns, len(chunks), line.from_ns, line.until_ns, hung_ns
        )  # fmt: skip

    def _make_room(self, waiting: int, chunks: int) -> None:
        """At least for so many."""
        columns = self.columns
        if (places := len(columns.works_NW)) < waiting:
            more = max(waiting, 2 * places) - places
            works_NW, sums_NW = (np.pad(each, ((0, more), (0, 0))) for each in (columns.works_NW, columns.sums_NW))
            self.columns = columns._replace(works_NW=works_NW, sums_NW=sums_NW)
        if (places := columns.chunks_2NW.shape[1]) < chunks:
            wider = np.pad(columns.chunks_2NW, ((0, 0), (0, chunks - places), (0, 0)))
            self.columns = self.columns._replace(chunks_2NW=wider)
