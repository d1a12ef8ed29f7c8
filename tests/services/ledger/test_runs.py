from hypothesis import given
from hypothesis import strategies as st

from services.ledger.runs import Run, WorkerRuns, restore, settle
from shared.contracts.ids import BlockId


def block(number: int) -> BlockId:
    return BlockId(number.to_bytes(16, "big"))


def path(*numbers: int) -> dict[BlockId, BlockId | None]:
    blocks = [block(each) for each in numbers]
    return dict(zip(blocks, [None, *blocks], strict=False))


def test_a_path_is_one_run_and_a_branch_another() -> None:
    runs = WorkerRuns()
    assert settle(runs, set(), path(1, 2, 3)) == {1}
    assert settle(runs, set(), {block(9): block(2), block(10): block(9)}) == {2}
    assert runs.runs == {1: Run(None, [block(1), block(2), block(3)]), 2: Run(block(2), [block(9), block(10)])}


def test_the_end_of_a_run_goes_and_its_number_stays() -> None:
    runs = WorkerRuns()
    settle(runs, set(), path(1, 2, 3))
    assert settle(runs, {block(3)}, {}) == {1}
    assert runs.runs == {1: Run(None, [block(1), block(2)])}
    assert settle(runs, {block(1), block(2)}, {}) == {1}
    assert not runs.runs


def test_a_run_is_split_where_a_block_leaves_its_middle() -> None:
    runs = WorkerRuns()
    settle(runs, set(), path(1, 2, 3, 4))
    assert settle(runs, {block(2)}, {}) == {1, 2}
    assert runs.runs == {1: Run(None, [block(1)]), 2: Run(block(2), [block(3), block(4)])}


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.integers(0, 30)), max_size=60), st.data())
def test_runs_always_say_what_the_worker_holds(steps: list[tuple[int, bool, int]], data: st.DataObject) -> None:
    """Blocks come below any that are there and go in any order, several at a time; a restart is in between."""
    runs, parents = WorkerRuns(), dict[BlockId, BlockId | None]()
    gone, new = set[BlockId](), dict[BlockId, BlockId | None]()
    for number, comes, below in steps:
        which = block(number)
        if comes and which not in parents:
            parents[which] = new[which] = block(below) if block(below) in parents else None
        elif not comes and which in parents:
            del parents[which]
            gone.add(which)
            new.pop(which, None)
        if data.draw(st.booleans()):
            settle(runs, gone, new)
            runs.check(parents)
            gone, new = set(), {}
            runs = restore(runs.next_run, [(each, runs.runs[each]) for each in sorted(runs.runs)])
    settle(runs, gone, new)
    runs.check(parents)
