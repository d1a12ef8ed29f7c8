"""Workers are set up as docs/sglang.md says."""

import re
import shlex

import pytest

from services.worker.settings import WorkerSettings
from tests.docs.test_readme import codes, page

PLACEHOLDERS = {"VERTUMNUS_BLOCKS_PER_RANK": "16384", "VERTUMNUS_NATS_URL": "nats://10.0.0.1:4222"}
"""Where a reader is to put something (`…`)."""


def environments() -> list[dict[str, str]]:
    """The variables of each block that starts a worker; some are in lists."""
    found = []
    for block in codes(re.sub("^ +", "", page("docs/sglang.md"), flags=re.MULTILINE)):
        if "-m services.worker" in block:
            words = shlex.split(block, comments=True)
            given = dict(word.split("=", 1) for word in words if re.match(r"VERTUMNUS_\w+=", word))
            found.append({name: PLACEHOLDERS[name] if "…" in value else value for name, value in given.items()})
    return found


def test_both_ways_are_shown() -> None:
    assert [each.get("VERTUMNUS_SGLANG_ADAPTIVE", "false") for each in environments()] == ["false", "true"]


@pytest.mark.parametrize("environment", environments(), ids=["fixed", "adaptive"])
def test_a_worker_takes_them(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = WorkerSettings().sglang()
    assert (settings.prefill_ranks, settings.block_tokens, settings.blocks_per_rank) == (8, 64, 16_384)
    assert settings.degrees == ((1, 2, 4, 8) if settings.adaptive else (4,))
