"""The work at every worker as columns, kept up with the folds: what `lines.Load` says of one worker, said of all at once.

A decision asks about every worker and changes one. So the folds name the workers whose load has changed (`Loads.touched`), and
`look` writes those rows anew; the rest is as it was. What time alone changes is reckoned with when it is asked for, but who has
waited too long stands in the columns, which say until when they hold.

Array names end in their axes: K ways to serve a request, W workers, N places in a line.
"""

from typing import NamedTuple

import numpy as np

from services.router.lines import FOREVER, HUNG_FACTOR, HUNG_US_MIN, Load
from services.router.loads import Loads
from services.router.roster import Bools, Roster, members
from shared.contracts.ids import WorkerId
from shared.model.calibration import PPM, Calibration
from shared.model.cost import Ints
from shared.model.pool import Pool


class Ahead(NamedTuple):
    """`lines.Ahead` of each way at each worker."""

    queue_us_KW: Ints
    jobs_KW: Ints


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
    def ratio_ppm(self) -> Ints | None:
        """Measured over predicted time of each worker; None if it is 1 for all."""
        return self._lines.ratio_ppm_W if self._lines.uneven else None

    def hung(self, now_ns: int) -> Bools | None:
        """Who has given no sign for too long; None if nobody."""
        hung_W: Bools = self._lines.hung_ns_W <= now_ns
        return hung_W if now_ns >= self._lines.hung_ns and hung_W.any() else None

    def elapsed_us(self, now_ns: int) -> Ints:
        """Since the last sign of each worker where something runs; 0 elsewhere."""
        elapsed_us_W: Ints = np.maximum(now_ns - self._lines.sign_ns_W, 0) // 1_000
        return elapsed_us_W

    def queue_us(self, elapsed_us_W: Ints) -> Ints:
        """q, as `Load.at` has it."""
        left_us_W = np.maximum(self._lines.left_us_W - elapsed_us_W, elapsed_us_W >> 2)
        queue_us_W: Ints = self._lines.waiting_us_W + left_us_W
        return queue_us_W

    def ahead(self, service_us_KW: Ints, elapsed_us_W: Ints) -> Ahead:
        """As `Load.ahead` has it."""
        return self._lines.ahead(service_us_KW, elapsed_us_W)

    def check(self, pool: Pool, loads: Loads, calibration: Calibration) -> None:
        """The columns say what the folds say of each worker that has not been touched since."""
        if self._changes != pool.changes:
            return
        now_ns = max(self._lines.from_ns, 0)
        elapsed_us_W = self.elapsed_us(now_ns)
        queue_us_W, hung_W = self.queue_us(elapsed_us_W), self._lines.hung_ns_W <= now_ns
        probes = (0, 300_000, FOREVER - 1)
        ahead = self.ahead(np.repeat(np.array(probes)[:, None], len(self.roster.workers), axis=1), elapsed_us_W)
        for row, worker in enumerate(self.roster.workers):
            if worker in loads.touched:
                continue
            load = loads.of_worker.get(worker) or Load()
            assert load.at(now_ns) == (queue_us_W[row], hung_W[row]), f"{worker} has another load"
            for way, service_us in enumerate(probes):
                found = ahead.queue_us_KW[way, row], ahead.jobs_KW[way, row]
                assert load.ahead(service_us, now_ns) == found, f"{worker} has another line"
            assert self._lines.ratio_ppm_W[row] == calibration.ratio_ppm(worker), f"{worker} has another ratio"


class _Lines:
    """The columns. Waiting work is sorted in `works_NW`, with `FOREVER` after the last; `sums_NW` says how much the first so
    many of a line are. Those who have waited too long are ahead of every newcomer, and are in `late_us_W` instead. Running
    prompts that are done in chunks are few, and listed by row."""

    def __init__(self, roster: Roster) -> None:
        workers = len(roster.workers)
        self._roster = roster
        self._idle = Load()
        self.ratio_ppm_W = np.full(workers, PPM)
        self.uneven = False
        self.waiting_us_W, self.late_us_W, self.left_us_W = np.zeros((3, workers), dtype=np.int64)
        self.sign_ns_W, self.hung_ns_W, self._from_ns_W, self._until_ns_W = np.full((4, workers), FOREVER)
        self.hung_ns, self.from_ns, self._until_ns = FOREVER, -FOREVER, FOREVER
        self._from_ns_W[:] = -FOREVER
        self._count_W = np.zeros(workers, dtype=np.int64)
        self._works_NW = np.empty((0, workers), dtype=np.int64)
        self._sums_NW = np.zeros((1, workers), dtype=np.int64)
        self._chunks: dict[int, list[tuple[int, int]]] = {}

    # --- changes

    def write(self, loads: Loads, calibration: Calibration, touched: set[WorkerId], now_ns: int) -> None:
        """These workers' rows."""
        rows = self._roster.rows
        for worker in touched:
            if (row := rows.get(worker)) is not None:
                self._write(row, loads.of_worker.get(worker, self._idle), now_ns)
                self.ratio_ppm_W[row] = calibration.ratio_ppm(worker)
        self._sum_up()

    def age(self, loads: Loads, now_ns: int) -> None:
        """Write again the rows where somebody more, or fewer if the clock was set back, has waited too long."""
        if self.from_ns <= now_ns < self._until_ns:
            return
        for row in np.flatnonzero((now_ns < self._from_ns_W) | (self._until_ns_W <= now_ns)).tolist():
            self._write(row, loads.of_worker[self._roster.workers[row]], now_ns)
        self._sum_up()

    def _sum_up(self) -> None:
        if not self._roster.workers:
            return
        self.uneven = not _least(self.ratio_ppm_W) == PPM == _greatest(self.ratio_ppm_W)
        self.hung_ns = _least(self.hung_ns_W)
        self.from_ns, self._until_ns = _greatest(self._from_ns_W), _least(self._until_ns_W)

    def _write(self, row: int, load: Load, now_ns: int) -> None:
        line = load.line.as_of(now_ns)
        waiting = len(line.works)
        if waiting > len(self._works_NW):
            self._widen(max(waiting, 2 * len(self._works_NW)))
        self._works_NW[:waiting, row], self._works_NW[waiting:, row] = line.works, FOREVER
        self._sums_NW[: waiting + 1, row] = line.sums
        self._count_W[row] = waiting
        self.waiting_us_W[row] = load.line.total_us
        self.late_us_W[row] = load.line.total_us - line.sums[-1]
        self._from_ns_W[row], self._until_ns_W[row] = line.from_ns, line.until_ns
        self._run(row, load)

    def _run(self, row: int, load: Load) -> None:
        self._chunks.pop(row, None)
        if load.sign_ns is None:
            self.left_us_W[row], self.sign_ns_W[row], self.hung_ns_W[row] = 0, FOREVER, FOREVER
            return
        left_us = sum(each.left_us for each in load.running.values())
        self.left_us_W[row], self.sign_ns_W[row] = left_us, load.sign_ns
        self.hung_ns_W[row] = load.sign_ns + (max(HUNG_FACTOR * left_us, HUNG_US_MIN) + 1) * 1_000
        if chunks := [(each.left_us, each.chunk_us) for each in load.running.values() if each.chunk_us < each.left_us]:
            self._chunks[row] = chunks

    def _widen(self, places: int) -> None:
        more = places - len(self._works_NW)
        self._works_NW = np.pad(self._works_NW, ((0, more), (0, 0)), constant_values=FOREVER)
        self._sums_NW = np.pad(self._sums_NW, ((0, more), (0, 0)))

    # --- questions

    def ahead(self, service_us_KW: Ints, elapsed_us_W: Ints) -> Ahead:
        """What a request of so much work would wait for in each way."""
        before_KW = np.add.reduce(self._works_NW[:, None] <= service_us_KW, axis=0, dtype=np.int64)
        queue_us_KW = self._sums_NW[before_KW, self._roster.all_W] + self.late_us_W
        jobs_KW = self._count_W - before_KW
        left_us_KW = self.left_us_W
        if self._chunks:
            left_us_KW = self._in_chunks(service_us_KW, jobs_KW)
        queue_us_KW += np.maximum(left_us_KW - elapsed_us_W, elapsed_us_W >> 2)
        return Ahead(queue_us_KW, jobs_KW)

    def _in_chunks(self, service_us_KW: Ints, jobs_KW: Ints) -> Ints:
        """What is left of what runs, less those that a newcomer overtakes after a chunk, of which the longest is ahead of it.
        They are counted in `jobs_KW`."""
        listed = [(row, *chunk) for row, chunks in self._chunks.items() for chunk in chunks]
        row_J, left_us_J, chunk_us_J = np.array(listed, dtype=np.int64).T
        ways, overtaken = np.nonzero(service_us_KW[:, row_J] < left_us_J)
        at = ways, row_J[overtaken]
        left_us_KW = np.broadcast_to(self.left_us_W, service_us_KW.shape).copy()
        chunk_us_KW = np.zeros_like(left_us_KW)
        np.add.at(jobs_KW, at, 1)
        np.subtract.at(left_us_KW, at, left_us_J[overtaken])
        np.maximum.at(chunk_us_KW, at, chunk_us_J[overtaken])
        return left_us_KW + chunk_us_KW


def _least(column_W: Ints) -> int:
    """Of a few dozen, a search for its place takes a fifth of the time of `min`."""
    return int(column_W[column_W.argmin()])


def _greatest(column_W: Ints) -> int:
    return int(column_W[column_W.argmax()])
