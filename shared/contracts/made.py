"""Events out of values that this process has worked out itself.

What comes from outside is validated (`codec.py`). A router's decision is made of numbers and of names that were read, and so
validated, before; doing that again for each of a decision's candidates takes as long as the decision.
"""

from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel

_Model = TypeVar("_Model", bound=BaseModel)

_set = object.__setattr__


def made(form: type[_Model], fields: dict[str, Any]) -> _Model:
    """What `form(**fields)` gives for valid values, in a fraction of the time. `fields` has a value for each field, in the
    order of the class, and belongs to the model from now on."""
    model = form.__new__(form)
    _set(model, "__dict__", fields)
    _set(model, "__pydantic_fields_set__", _names(form))
    _set(model, "__pydantic_extra__", {})
    _set(model, "__pydantic_private__", None)
    return model


@cache
def _names(form: type[BaseModel]) -> set[str]:
    """One set for all of a kind: nothing of a frozen model is changed, and a copy has a set of its own."""
    return set(form.model_fields)
