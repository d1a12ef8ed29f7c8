"""The fault simulation runs the services' rules; it has none of its own."""

import ast
from pathlib import Path

import simulation.faults
from shared.contracts.envelope import EVENT_TYPES

FAULTS = Path(simulation.faults.__file__).parent
TREES = {path.name: ast.parse(path.read_text()) for path in FAULTS.rglob("*.py")}
EVENTS = {cls.__name__ for cls in EVENT_TYPES.values()}
DECISIONS = {"evolve", "decide", "choose", "advance", "orders", "plan", "wanted", "receive", "redirect", "commit"}


def test_it_makes_no_event() -> None:
    """Every event of a run comes out of a service. Naming a class in a `case` reads one; calling it would make one."""
    made = {
        name: found
        for name, tree in TREES.items()
        if (found := EVENTS & {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)})
    }
    assert TREES
    assert not made


def test_it_defines_no_decision() -> None:
    defined = {
        name: found
        for name, tree in TREES.items()
        if (found := DECISIONS & {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)})
    }
    assert not defined
