"""One example of every event version, the same on every run."""

import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel

import shared.contracts.events  # noqa: F401 - fills EVENT_TYPES
from shared.contracts.envelope import EVENT_TYPES, Envelope, EventData
from shared.contracts.events import CommittedWorker, EpochCommitted
from shared.contracts.geometry import Degree
from shared.contracts.ids import NodeId, Source, worker_id

OF_ID = {"WorkerId": "a-node/6/4"}
"""An id that does not look like `a-<name of its field>`."""


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
    """`cls` with a value in every field that says which field it is, where its form allows that."""
    if cls is EpochCommitted:
        return _committed()
    return cls(**{name: _value(field.annotation, name, field.metadata) for name, field in cls.model_fields.items()})


def _committed() -> EpochCommitted:
    """Its workers are those of its composition, or it would not be read."""
    node = NodeId("a-node")
    workers = tuple(
        CommittedWorker(
            worker=worker_id(node, 6, rank), first_rank=rank, degree=4, capacity_us=12, capacity_version="a-version"
        )
        for rank in (0, 4)
    )
    return EpochCommitted(node=node, epoch=6, composition=(4, 4), workers=workers, drain_us=9, switch_us=10)


def _value(annotation: Any, name: str, limits: Sequence[Any] = ()) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(arguments[0], name, arguments[1:])
    if origin in (Union, types.UnionType):
        return _value(next(each for each in arguments if each is not type(None)), name, limits)
    if origin is Literal:
        return arguments[-1]
    if origin is tuple and name.endswith("composition"):
        return (4, 4)
    if origin is tuple:
        return (_value(arguments[0], name), _value(arguments[0], name))
    if origin is dict:
        return {_value(arguments[0], name): _value(arguments[1], name)}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return filled(annotation)
    if (of := getattr(annotation, "__name__", "")) in OF_ID:
        return OF_ID[of]
    return _plain(_supertype(annotation), name, limits)


def _supertype(annotation: Any) -> Any:
    """What a NewType is of, without what its values are held to."""
    of = getattr(annotation, "__supertype__", annotation)
    return get_args(of)[0] if get_origin(of) is Annotated else of


def _plain(annotation: Any, name: str, limits: Sequence[Any]) -> Any:
    # In the order of the chain: the field's bytes are ids of blocks, 16 bytes each.
    if annotation is bytes:
        return name.encode().ljust(16, b".")[:16] * (2 if name == "block_ids" else 1)
    if annotation is str:
        return f"a-{name}"
    if annotation is bool:
        return True
    if get_args(Degree)[1] in limits:
        return 8
    if annotation is int:
        most = min(
            [each.le for each in limits if isinstance(each, Le)]
            + [each.lt - 1 for each in limits if isinstance(each, Lt)]
            or [99]
        )
        return min(most, max([1 + len(name), *(each.ge for each in limits if isinstance(each, Ge))]))
    if annotation is float:
        return max([0.5, *(each.gt + 1 for each in limits if isinstance(each, Gt))])
    if annotation is Any:
        return {name: [1, 2.5, "three", None]}
    raise AssertionError(f"{name}: no example for {annotation}")


ALL = sorted(EVENT_TYPES.items(), key=lambda item: item[0])
