"""A file that a command writes is whole under its name, also when two commands write it."""

from pathlib import Path

import pytest

from cli.files import whole


def test_the_name_comes_with_the_last_byte(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with whole(out) as file:
        file.write(b"all of it")
        assert not out.exists()
    assert out.read_bytes() == b"all of it"
    assert list(tmp_path.iterdir()) == [out]


def test_what_a_killed_command_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "out.partial").write_bytes(b"a long rest of something else")
    with whole(tmp_path / "out") as file:
        file.write(b"new")
    assert (tmp_path / "out").read_bytes() == b"new"


def test_two_commands_do_not_write_one_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with whole(out) as first:
        first.write(b"first")
        with pytest.raises(BlockingIOError), whole(out):
            pass
        first.write(b" and whole")
    assert out.read_bytes() == b"first and whole"


def test_after_an_error_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="closed"), whole(tmp_path / "out") as file:
        file.close()
    assert list(tmp_path.iterdir()) == []
