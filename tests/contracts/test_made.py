"""Events that are made without being validated are those that validation gives."""

import pytest
from pydantic import BaseModel

from shared.contracts.codec import encode
from shared.contracts.envelope import EventData
from shared.contracts.events import PricedCandidate, RequestAssigned
from shared.contracts.made import made
from tests.contracts.examples import ALL, example


@pytest.mark.parametrize("cls", [cls for _, cls in ALL], ids=lambda cls: f"{cls.TYPE}-v{cls.VERSION}")
def test_every_event_is_the_same_made_either_way(cls: type[EventData]) -> None:
    event = example(cls)
    twin = made(cls, {name: getattr(event.data, name) for name in cls.model_fields})
    assert_alike(twin, event.data)
    assert encode(event.model_copy(update={"data": twin})) == encode(event)


def test_so_is_a_candidate() -> None:
    assigned = example(RequestAssigned).data
    assert isinstance(assigned, RequestAssigned)
    for each in assigned.candidates:
        assert_alike(made(PricedCandidate, {name: getattr(each, name) for name in PricedCandidate.model_fields}), each)


def assert_alike(one: BaseModel, other: BaseModel) -> None:
    assert one == other
    assert one.model_fields_set == other.model_fields_set
    assert one.model_extra == other.model_extra
    assert one.model_dump_json() == other.model_dump_json()
    with pytest.raises(ValueError, match="frozen"):
        one.anything = 1  # type: ignore[attr-defined]
