"""`vertumnus profile` and `fit` as a user runs them: on a modelled machine whose answer is known, and on a real tiny model."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.main import app
from services.worker.engine.modelled import ModelledEngine
from shared.model.cost import load_coefficients
from tests.cli.profiling.made_up import KNOWN, profile_of
from tests.support.tiny_models import write_tiny_model


def typed(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200"})


async def never_started(_engine: ModelledEngine) -> None:
    raise AssertionError("a large model takes minutes")


def test_what_the_modelled_engine_is_made_of_is_found_by_profile_and_fit(tmp_path: Path) -> None:
    profile, coefficients = tmp_path / "profile.json", tmp_path / "mine.json"
    done = typed("profile", "--engine", "modelled", "--lengths", "64,1000,20000,100000", "-o", profile)
    assert done.exit_code == 0, done.output
    assert "says nothing of a machine" in done.stderr
    done = typed("fit", profile, "-o", coefficients, "--form", "paper")
    assert done.exit_code == 0, done.output
    assert "held out" in done.stdout
    found, known = load_coefficients(str(coefficients)), load_coefficients("qwen3_30b_a3b_h20")
    for name in ("d", "a", "b", "c", "alpha"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-3)


def test_a_real_engine_is_profiled_with_its_prefixes_resident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_model(tmp_path / "tiny", "llama")
    monkeypatch.setenv("VERTUMNUS_BLOCK_TOKENS", "16")
    profile = tmp_path / "profile.json"
    words = ("--degrees", "1,2", "--lengths", "32,100", "--repeats", "2", "--budget-s", "3600", "-o", profile, "--json")
    done = typed("profile", "--model", model, *words)
    assert done.exit_code == 0, done.output
    written = json.loads(profile.read_text())
    assert written == json.loads(done.stdout)
    assert (written["model"], written["engine"], written["dtype"], written["device"]) == (
        "tiny",
        "torch",
        "float32",
        "cpu",
    )
    shapes = [(p["uncached_tokens"], p["cached_tokens"]) for p in written["points"] if p["degree"] == 2]
    assert shapes == [(32, 0), (16, 16), (100, 0), (52, 48), (20, 80)]
    assert all(len(point["seconds"]) == 2 for point in written["points"])
    done = typed("fit", profile, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["version"].startswith("tiny_cpu-")


@pytest.mark.parametrize(("name", "magic"), [("fit.png", b"\x89PNG"), ("fit.svg", b"<?xml")])
def test_a_fit_is_drawn(tmp_path: Path, name: str, magic: bytes) -> None:
    profile, picture = tmp_path / "profile.json", tmp_path / name
    profile.write_text(profile_of().model_dump_json())
    done = typed("fit", profile, "--plot", picture)
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(magic)
    assert picture.stat().st_size > 5_000


def test_the_better_form_is_the_one_that_errs_less_on_unseen_shapes(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(profile_of().model_dump_json())
    forms = {}
    for form in ("better", "paper", "with-g"):
        found = json.loads(typed("fit", profile, "--form", form, "--json").stdout)
        forms[form] = (found["fit"]["form"], found["g"] > 0)
    assert forms == {"better": ("with g", True), "paper": ("paper", False), "with-g": ("with g", True)}


def test_the_version_follows_the_numbers_and_the_name(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(profile_of().model_dump_json())
    once, again = (json.loads(typed("fit", profile, "--json").stdout)["version"] for _ in range(2))
    named = json.loads(typed("fit", profile, "--json", "--name", "Rack 7").stdout)["version"]
    profile.write_text(profile_of(KNOWN.scaled(1.01)).model_dump_json())
    slower = json.loads(typed("fit", profile, "--json").stdout)["version"]
    assert once == again
    assert once.startswith("some_model_1_5b_cpu-")
    assert named == f"rack_7-{once[-8:]}"
    assert slower[:-8] == once[:-8]
    assert slower[-8:] != once[-8:]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("profile", "--engine", "modelled", "--degrees", "1,x"), "--degrees '1,x': give numbers"),
        (("profile", "--engine", "modelled", "--degrees", "3,1,0"), "--degrees [3, 0]: each must be one of 1, 2, 4, 8"),
        (("profile", "--engine", "modelled", "--lengths", "0"), "--lengths [0]: each must be in [1, "),
        (("profile", "--engine", "modelled", "--hit-ratios", "0,1.5"), "--hit-ratios 1.5: must be in [0, 1)"),
        (("profile", "--model", "/"), "--model: / holds no model"),
    ],
)
def test_what_is_wrong_with_an_order_is_one_line_and_costs_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(ModelledEngine, "start", never_started)
    done = typed(*words, "-o", tmp_path / "out.json")
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["profile", "capacity"])
def test_a_place_that_cannot_be_written_to_is_found_out_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("nothing can be kept of it")

    monkeypatch.setattr("cli.profiling.profiling.run_on_node", measured)
    monkeypatch.setattr("cli.profiling.capacity.run_on_node", measured)
    coefficients = () if verb == "profile" else ("qwen3_30b_a3b_h20",)
    done = typed(verb, *coefficients, "--engine", "modelled", "-o", tmp_path / "nowhere" / "out.json")
    assert done.exit_code == 2, done.output
    assert "No such file or directory" in done.stderr


def test_a_bad_profile_and_a_bad_picture_are_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(profile_of().model_dump_json().replace('"version":1', '"version":7'))
    done = typed("fit", bad)
    assert (done.exit_code, "profile version 7 is unknown" in done.stderr) == (2, True)
    assert typed("fit", tmp_path / "nowhere.json").exit_code == 2
    good = tmp_path / "good.json"
    good.write_text(profile_of().model_dump_json())
    done = typed("fit", good, "--plot", tmp_path / "fit.gif")
    assert (done.exit_code, "must end in one of png, svg" in done.stderr) == (2, True)


def test_a_fit_does_not_destroy_its_profile_and_says_what_it_cannot_know(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    whole = profile_of()
    profile.write_text(whole.model_dump_json())
    done = typed("fit", profile, "-o", tmp_path / "." / "profile.json")
    assert (done.exit_code, "is the profile itself" in done.stderr) == (2, True)
    assert profile.read_text() == whole.model_dump_json()
    done = typed("fit", profile)
    assert (done.exit_code, done.stderr) == (0, "")
    one_degree = tuple(point for point in whole.points if point.degree == 2)
    for points, shapes in ((one_degree, False), (one_degree[:3], True)):
        profile.write_text(whole.model_copy(update={"points": points}).model_dump_json())
        done = typed("fit", profile)
        assert done.exit_code == 0, done.output
        assert "degree 2 alone says nothing of other degrees" in done.stderr
        assert ("3 shapes cannot tell 6 coefficients apart" in done.stderr) is shapes
