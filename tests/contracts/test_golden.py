"""What was stored is read for ever."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.contracts import upcasts
from shared.contracts.codec import decode, encode
from shared.contracts.document import catalogue
from shared.contracts.envelope import EVENT_TYPES, Envelope, EventData, UnknownEvent
from tests.contracts.examples import ALL, example
from tests.contracts.golden import FOLDER, path_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("cls", [cls for _, cls in ALL], ids=lambda cls: f"{cls.TYPE}-v{cls.VERSION}")
def test_every_event_has_a_golden_file_and_is_written_as_in_it(cls: type[EventData]) -> None:
    path = path_of(cls)
    assert path.exists(), f"run `python -m tests.contracts.golden` and commit {path.name}"
    golden = path.read_bytes()
    event = decode(golden)
    assert type(event.data) is cls
    assert event == example(cls)
    assert encode(event) == golden, (
        f"{path.name} is what is stored: see tests/contracts/golden.py for how to change an event"
    )


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_golden_file_is_read_with_all_it_says(path: Path) -> None:
    event = decode(path.read_bytes())
    assert not isinstance(event.data, UnknownEvent), "an event type was removed, but the log holds it"
    if (event.type, event.version) in upcasts.UPCASTS:
        return  # its upcaster has a test of its own
    written = json.loads(encode(event))
    stored = json.loads(path.read_bytes())
    assert says_all(written["data"], stored["data"])
    assert {**written, "data": None} == {**stored, "data": None}


def says_all(written: Any, stored: Any) -> bool:
    """Whether `written` is `stored`, with more fields perhaps, here or further in."""
    if isinstance(stored, dict):
        return stored.keys() <= written.keys() and all(says_all(written[name], stored[name]) for name in stored)
    if isinstance(stored, list):
        return len(stored) == len(written) and all(map(says_all, written, stored))
    return bool(written == stored)


def test_a_field_that_is_lost_further_in_would_be_noticed() -> None:
    old = {"workers": [{"degree": 1}, {"degree": 2}]}
    assert says_all({"workers": [{"degree": 1, "more": 0}, {"degree": 2}], "more": 0}, old)
    for other in ([{"degree": 1}], [{"degree": 1}, {"degree": 3}], [{"degree": 1}, {"more": 2}]):
        assert not says_all({"workers": other}, old)


def test_a_missing_golden_file_would_be_noticed() -> None:
    class ThingHappened(EventData):
        TYPE, VERSION = "thing-happened", 1

    with pytest.raises(AssertionError, match=r"thing-happened-v1\.json"):
        test_every_event_has_a_golden_file_and_is_written_as_in_it(ThingHappened)


def test_a_changed_event_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that is renamed without a new version no longer fits its golden file."""
    key = ("router-registered", 1)

    class Renamed(EVENT_TYPES[key]):  # type: ignore[misc,valid-type]
        name: str

    monkeypatch.setitem(EVENT_TYPES, key, Renamed)
    with pytest.raises(ValueError, match=r"data\.name: Field required"):
        test_every_event_has_a_golden_file_and_is_written_as_in_it(Renamed)


def test_an_old_version_is_read_through_its_upcaster(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads(path_of(EVENT_TYPES["router-registered", 1]).read_bytes())
    stored |= {"version": 0, "data": {"name": "r1"}}
    monkeypatch.setattr(upcasts, "UPCASTS", {("router-registered", 0): lambda data: {"router": data["name"]}})
    event: Envelope = decode(json.dumps(stored).encode())
    assert event.version == 1
    assert event.data == EVENT_TYPES["router-registered", 1](router="r1")  # type: ignore[call-arg]


def test_the_documentation_is_what_the_code_says() -> None:
    assert (ROOT / "docs/events.md").read_text() == catalogue(), "run `make docs`"
