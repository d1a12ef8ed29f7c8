"""What `vertumnus doctor --sglang` makes of servers, by what a real one answered."""

from dataclasses import replace
from pathlib import Path

import pytest

from cli.sglang_checks import judge, sglang_checks
from services.worker.engine.sglang.facts import Facts
from services.worker.engine.sglang.settings import DecodeAddress, ServerAddress, SglangSettings
from tests.services.worker.engine.sglang.recordings import facts_told
from tests.support.tiny_models import write_tiny_model


@pytest.fixture
def settings(tmp_path: Path) -> SglangSettings:
    return SglangSettings(
        model_dir=write_tiny_model(tmp_path / "tiny-qwen3", "qwen3", context=4096),
        servers=(ServerAddress(url="http://n:1", degree=1),),
        decode=(),
        adaptive=False,
        block_tokens=16,
        blocks_per_rank=300,
        context_tokens_max=4096,
        silence_s=60.0,
        start_limit_s=60.0,
    )


def test_a_server_that_fits_says_what_it_has(settings: SglangSettings) -> None:
    (check,) = judge(settings, [Facts.model_validate(facts_told())])
    assert (check.name, check.ok, check.found) == (
        "SGLang prefill",
        True,
        "http://n:1: 0.5.23, 375 blocks of 16 tokens",
    )


def test_servers_that_do_not_say_why(settings: SglangSettings) -> None:
    pair = replace(settings, decode=(DecodeAddress(url="http://n:2"),))
    prefill, decode = judge(pair, [Facts.model_validate(facts_told()), "http://n:2: refused"])
    assert not prefill.ok
    assert "needed: 'prefill'" in prefill.found
    assert (decode.name, decode.ok, decode.found) == ("SGLang decode", False, "http://n:2: refused")


def test_settings_that_name_no_server_are_one_finding(tmp_path: Path) -> None:
    (check,) = sglang_checks(tmp_path)
    assert (check.ok, check.found) == (False, "sglang_servers: 0 servers; a node has 1 to 64")


def test_a_server_that_nobody_started_is_named(monkeypatch: pytest.MonkeyPatch, settings: SglangSettings) -> None:
    monkeypatch.setenv("VERTUMNUS_SGLANG_SERVERS", '[{"url": "http://127.0.0.1:9", "degree": 1}]')
    monkeypatch.setenv("VERTUMNUS_BLOCKS_PER_RANK", "300")
    (check,) = sglang_checks(settings.model_dir)
    assert not check.ok
    assert check.found.startswith("http://127.0.0.1:9: ConnectError")
