"""Profiles as files: read as written, refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.profiling.document import BadProfile, Point, read_profile
from shared.model.fitting import Sample
from tests.cli.profiling.made_up import profile_of


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(profile_of().model_dump_json())
    assert read_profile(file) == profile_of()


def test_a_point_counts_by_its_median() -> None:
    point = Point(degree=2, uncached_tokens=10, cached_tokens=64, seconds=(0.2, 9.0, 0.3))
    assert point.sample == Sample(2, 10, 64, 0.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version: .*profile version 2 is unknown; this code reads version 1"),
        ({"version": "next", "points": "in another form"}, "version: .*profile version next is unknown"),
        ({"kind": "trace"}, "kind: Input should be 'vertumnus-profile'"),
        ({"points": []}, "points: Tuple should have at least 1"),
        ({"degrees": [3]}, "degrees.0: .*1, 2, 4 or 8"),
        (
            {"points": [{"degree": 1, "uncached_tokens": 0, "cached_tokens": 0, "seconds": [1]}]},
            r"points\.0\.uncached_tokens: Input should be greater than or equal to 1",
        ),
        (
            {"points": [{"degree": 1, "uncached_tokens": 1, "cached_tokens": 0, "seconds": [0]}]},
            r"points\.0\.seconds\.0: Input should be greater than 0",
        ),
    ],
)
def test_a_file_that_is_none_is_refused_by_field_and_limit(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps({**json.loads(profile_of().model_dump_json()), **change}))
    with pytest.raises(BadProfile, match=rf"bad\.json: {message}"):
        read_profile(file)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(b"\x00\x01")
    with pytest.raises(BadProfile, match=r"bad\.json: content: Invalid JSON"):
        read_profile(file)
