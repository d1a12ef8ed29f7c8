"""One example of every event version, the same on every run."""

import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin
from uuid import UUID

from annotated_types import Ge, Gt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import shared.contracts.events  # noqa: F401 - fills EVENT_TYPES
from shared.contracts.envelope import EVENT_TYPES, Envelope, EventData
from shared.contracts.ids import Source


def example(cls: type[EventData]) -> Envelope:
    """An envelope with `cls` in it, every field filled."""
    return Envelope(
        id=UUID("01900000-0000-7000-8000-000000000001"),
        type=cls.TYPE,
        version=cls.VERSION,
        pool="main",
        source=Source("router-1-0a1b2c3d"),
        source_seq=7,
        time_ns=1_800_000_000_123_456_789,
        correlation="request-1",
        causation=UUID("01900000-0000-7000-8000-000000000002"),
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        data=filled(cls),
    )


def filled(cls: type[BaseModel]) -> Any:
    """`cls` with a value in every field that says which field it is."""
    return cls(**{name: _value(field.annotation, name, field) for name, field in cls.model_fields.items()})


def _value(annotation: Any, name: str, field: FieldInfo | None = None) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _value(next(each for each in arguments if each is not type(None)), name, field)
    if origin is Literal:
        return arguments[-1]
    if origin is tuple:
        return (_value(arguments[0], name), _value(arguments[0], name))
    if origin is dict:
        return {_value(arguments[0], name): _value(arguments[1], name)}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return filled(annotation)
    plain = getattr(annotation, "__supertype__", annotation)
    return _plain(plain, name, field.metadata if field else ())


def _plain(annotation: Any, name: str, limits: Sequence[Any]) -> Any:
    # In the order of the chain: the field's bytes are ids of blocks, 16 bytes each.
    if annotation is bytes:
        return name.encode().ljust(16, b".")[:16] * (2 if name == "block_ids" else 1)
    if annotation is str:
        return f"a-{name}"
    if annotation is bool:
        return True
    if annotation is int:
        return max([1 + len(name), *(each.ge for each in limits if isinstance(each, Ge))])
    if annotation is float:
        return max([0.5, *(each.gt + 1 for each in limits if isinstance(each, Gt))])
    if annotation is Any:
        return {name: [1, 2.5, "three", None]}
    raise AssertionError(f"{name}: no example for {annotation}")


ALL = sorted(EVENT_TYPES.items(), key=lambda item: item[0])
