"""Every value that the schemas of events let through, for hypothesis: the useful ones, and the nonsense."""

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel

from shared.contracts.events import CommittedWorker, EpochCommitted
from shared.contracts.geometry import DEGREES, Degree
from shared.contracts.ids import BLOCK_ID_BYTES, NodeId, worker_id

Strategy = st.SearchStrategy[Any]

TEXT = st.text(max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
COMPOSITIONS = st.sampled_from([(1, 1, 2, 4), (8,), (4, 4), (1,), (8,) * 8])

ANY_ID: Mapping[str, Strategy] = {
    "WorkerId": st.from_regex(r"[A-Za-z0-9_-]{1,64}/([0-9]{1,18}|decode)/[0-9]{1,4}", fullmatch=True),
    "TenantId": st.text(min_size=1, max_size=64),
    **dict.fromkeys(("RequestId", "NodeId", "RouterId", "Source"), NAMES),
}

FEW_IDS: Mapping[str, Strategy] = {
    "WorkerId": st.sampled_from(["n0/1/0", "n0/1/4", "n0/2/0", "n1/1/1", "n0/decode/0", "n9/999999999999999999/9999"]),
    "TenantId": st.just("default"),
    "RequestId": st.sampled_from(["q1", "q2"]),
    "NodeId": st.sampled_from(["n0", "n1"]),
    "RouterId": st.sampled_from(["r1", "r2"]),
    "Source": st.sampled_from(["r1", "r2"]),
}
"""So few that events speak of the same things."""


class Values:
    """`ids` gives each kind of id. With `few`, numbers and blocks are few as well, and numbers as strange as they may be."""

    def __init__(self, ids: Mapping[str, Strategy], *, few: bool = False) -> None:
        self._ids = ids
        self._few = few

    def of(self, annotation: Any, limits: tuple[Any, ...] = ()) -> Strategy:
        """Any value that a field of this type may hold."""
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            return self.of(arguments[0], arguments[1:])
        if (name := getattr(annotation, "__name__", "")) in self._ids:
            return self._ids[name]
        if origin in (Union, types.UnionType):
            return st.one_of(*(self.of(each, limits) for each in arguments))
        if origin is Literal:
            return st.sampled_from(arguments)
        if origin is tuple and arguments[0] is int:
            return COMPOSITIONS
        if origin is tuple and arguments[-1] is not Ellipsis:
            return st.tuples(*map(self.of, arguments))
        if origin is tuple:
            return st.lists(self.of(arguments[0]), max_size=3).map(tuple)
        if origin is dict:
            return st.dictionaries(self.of(arguments[0]), self.of(arguments[1]), max_size=3)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return self.models(annotation)
        return self._plain(getattr(annotation, "__supertype__", annotation), limits)

    def models(self, cls: type[BaseModel]) -> Strategy:
        """Any instance of a model."""
        if cls is EpochCommitted:
            return self.commits()
        fields = {name: self.of(field.annotation, tuple(field.metadata)) for name, field in cls.model_fields.items()}
        return st.builds(cls, **fields)

    def commits(self) -> Strategy:
        """Its workers are those of its composition."""
        epochs = st.integers(1, 3 if self._few else 10**18 - 1)
        return st.builds(_commit, self._ids["NodeId"], epochs, COMPOSITIONS)

    def _plain(self, of: Any, limits: tuple[Any, ...]) -> Strategy:
        if get_args(Degree)[1] in limits:
            return st.sampled_from(DEGREES)
        above = any(isinstance(each, Gt) for each in limits)
        least = max([0, *(each.ge for each in limits if isinstance(each, Ge))])
        packed = any(isinstance(each, AfterValidator) for each in limits)
        found: dict[Any, Strategy] = {
            type(None): st.none(),
            str: TEXT,
            bytes: self._bytes(packed),
            bool: st.booleans(),
            int: self._whole(limits),
            float: st.floats(least, 1e9, exclude_min=above, allow_nan=False),
            Any: JSON,
        }
        return found[of]

    def _whole(self, limits: tuple[Any, ...]) -> Strategy:
        least = [each.ge for each in limits if isinstance(each, Ge)]
        most = [each.le for each in limits if isinstance(each, Le)]
        most += [each.lt - 1 for each in limits if isinstance(each, Lt)]
        if not self._few:
            return st.integers(max(least, default=0), min(most, default=2**53))
        low, high = max(least, default=-(2**53)), min(most, default=2**53)
        return st.sampled_from([each for each in (low, -1, 0, 1, 2, 3, high) if low <= each <= high])

    def _bytes(self, packed: bool) -> Strategy:
        if self._few:
            whole = st.lists(st.sampled_from([b"a" * 16, b"b" * 16, b"c" * 16]), max_size=4).map(b"".join)
            return whole if packed else whole | st.binary(max_size=20)
        return st.binary(max_size=40).map(
            lambda raw: raw[: len(raw) // BLOCK_ID_BYTES * BLOCK_ID_BYTES] if packed else raw
        )


def _commit(node: str, epoch: int, composition: tuple[int, ...]) -> EpochCommitted:
    ranks = [sum(composition[:index]) for index in range(len(composition))]
    workers = tuple(
        CommittedWorker(worker=worker_id(NodeId(node), epoch, rank), first_rank=rank, degree=degree, capacity_us=1)
        for rank, degree in zip(ranks, composition, strict=True)
    )
    return EpochCommitted(node=NodeId(node), epoch=epoch, composition=composition, workers=workers)
