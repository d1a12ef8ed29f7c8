"""A fold that says which events it hears hears exactly those that it has a case for: no new case is left out in silence."""

import ast
import inspect
from types import ModuleType

import pytest

from services.cachemgr import replication
from services.controller import activity, windows
from services.router import loads
from shared.model import backlog, holders

FOLDS = (activity, backlog, holders, loads, replication, windows)


@pytest.mark.parametrize("fold", FOLDS, ids=lambda fold: fold.__name__)
def test_what_is_heard_is_what_there_are_cases_for(fold: ModuleType) -> None:
    function = ast.parse(inspect.getsource(fold.evolve))
    cases = {ast.unparse(each.cls) for each in ast.walk(function) if isinstance(each, ast.MatchClass)}
    asked = {
        ast.unparse(each.args[1])
        for each in ast.walk(function)
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "isinstance"
    }
    told = [vars(fold)[name] for name in cases | asked]
    assert {kind for each in told for kind in (each if isinstance(each, tuple) else (each,))} == fold.HEARD
