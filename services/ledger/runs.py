"""What a worker holds as runs: consecutive blocks of one path in one row, because one row per block would be most of the
database. A run is split when a block leaves its middle; it is never joined with another.

Run numbers depend on the events alone, not on how they were batched, so a rebuild gives the same rows.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from shared.contracts.ids import BlockId

Parents = Mapping[BlockId, BlockId | None]


@dataclass(slots=True)
class Run:
    """`blocks` in order; the first one's parent is `parent`."""

    parent: BlockId | None
    blocks: list[BlockId]


@dataclass(slots=True)
class WorkerRuns:
    """The runs of one worker. `settle` is their only writer."""

    next_run: int = 1
    runs: dict[int, Run] = field(default_factory=dict)
    of_block: dict[BlockId, int] = field(default_factory=dict)

    def check(self, parents: Parents) -> None:
        """The runs say exactly what `parents` says."""
        found: dict[BlockId, BlockId | None] = {}
        for run in self.runs.values():
            assert run.blocks, "a run without blocks is kept"
            for parent, block in zip([run.parent, *run.blocks], run.blocks, strict=False):
                assert block not in found, f"{block.hex()} is in two runs"
                assert self.of_block[block] in self.runs, f"{block.hex()} is in a run that is gone"
                found[block] = parent
        assert found == dict(parents), "the runs and the worker's blocks differ"


def settle(state: WorkerRuns, dropped: Set[BlockId], added: Parents) -> set[int]:
    """Take `dropped` blocks out of the runs, then put `added` ones (with their parents, parents first) into new ones.

    Returns the numbers of the runs that changed; those that are gone are no longer in `state.runs`.
    """
    broken = sorted({state.of_block[block] for block in dropped if block in state.of_block})
    changed = set(broken)
    for number in broken:
        run = state.runs.pop(number)
        for block in run.blocks:
            del state.of_block[block]
        parents = dict(zip(run.blocks, [run.parent, *run.blocks], strict=False))
        changed |= _add(state, parents, [block for block in run.blocks if block not in dropped], number)
    return changed | _add(state, added, list(added))


def restore(next_run: int, rows: Iterable[tuple[int, Run]]) -> WorkerRuns:
    """The runs of stored rows."""
    state = WorkerRuns(next_run)
    for number, run in rows:
        state.runs[number] = run
        state.of_block.update(dict.fromkeys(run.blocks, number))
    return state


def _add(state: WorkerRuns, parents: Parents, blocks: Sequence[BlockId], first_number: int | None = None) -> set[int]:
    """New runs of `blocks`; the first may keep the number of the run that it is what is left of."""
    numbers: set[int] = set()
    run: Run | None = None
    for block in blocks:
        if run is None or parents[block] != run.blocks[-1]:
            if first_number is not None and not numbers:
                number = first_number
            else:
                number, state.next_run = state.next_run, state.next_run + 1
            run = state.runs[number] = Run(parents[block], [])
            numbers.add(number)
        run.blocks.append(block)
        state.of_block[block] = number
    return numbers
