"""Which servers may serve in a pool, and what settings say of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.worker.engine.protocol import EngineError
from services.worker.engine.sglang.facts import Facts, decode_refusals, refusals
from services.worker.engine.sglang.model_facts import ModelFacts, read_model
from services.worker.engine.sglang.settings import DecodeAddress, ServerAddress, SglangSettings, why_not
from services.worker.settings import WorkerSettings
from tests.services.worker.engine.sglang.recordings import facts_told
from tests.support.tiny_models import VOCAB, write_tiny_model

ADDRESS = ServerAddress(url="http://10.0.0.1:30000", degree=1)
MODEL = ModelFacts(("Qwen3ForCausalLM",), VOCAB, 4096, "float32", 1_152)
SETTINGS = SglangSettings(
    model_dir=Path("/models/tiny-qwen3"),
    servers=(ADDRESS,),
    decode=(),
    adaptive=False,
    block_tokens=16,
    blocks_per_rank=300,
    context_tokens_max=4096,
    silence_s=60.0,
    start_limit_s=60.0,
)


def facts(**changed: Any) -> Facts:
    return Facts.model_validate({**facts_told(), **changed})


def test_a_recorded_server_is_taken() -> None:
    assert refusals(facts(), ADDRESS, SETTINGS, MODEL) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"version": "0.5.24"}, "version: 0.5.24"),
        ({"model_path": "/models/other"}, "model_path: '/models/other'"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"page_size": 64}, "page_size: 64, but block_tokens is 16"),
        ({"tp_size": 2}, "2 GPUs, but sglang_servers says degree 1"),
        ({"dp_size": 2}, "2 caches"),
        ({"attn_dp_size": 2}, "2 caches"),
        ({"max_total_num_tokens": 1600}, "room for 100 blocks, but blocks_per_rank says 300"),
        ({"max_req_input_len": 4000}, "max_req_input_len: 4000"),
        ({"disable_radix_cache": True}, "disable_radix_cache"),
        ({"disaggregation_mode": "prefill"}, "disaggregation_mode: 'prefill'; needed: 'null'"),
        ({"kv_events": None}, "--kv-events-config"),
    ],
)
def test_each_reason_to_refuse_names_the_field(changed: dict[str, Any], words: str) -> None:
    (reason,) = refusals(facts(**changed), ADDRESS, SETTINGS, MODEL)
    assert reason.startswith(ADDRESS.url)
    assert words in reason


def test_every_reason_is_told_at_once() -> None:
    assert len(refusals(facts(version="1", page_size=1, tp_size=8), ADDRESS, SETTINGS, MODEL)) == 3


def test_with_the_plug_in_each_gpu_has_a_cache() -> None:
    adaptive = replace(SETTINGS, adaptive=True, servers=(ServerAddress(url="http://n:1", degree=4),))
    fits: dict[str, Any] = {"tp_size": 4, "attn_dp_size": 4, "internal_states": [{"vertumnus": {"unit": 0}}, {}]}
    assert refusals(facts(**fits), adaptive.servers[0], adaptive, MODEL) == []
    for changed, words in (
        ({"attn_dp_size": None}, "one per GPU"),
        ({"enable_hierarchical_cache": True}, "enable_hierarchical_cache"),
        ({"internal_states": [{"load": 0}] * 4}, "start it with VERTUMNUS_SGLANG=1"),
    ):
        (reason,) = refusals(facts(**fits | changed), adaptive.servers[0], adaptive, MODEL)
        assert words in reason


def test_decode_servers_decode() -> None:
    pd = replace(SETTINGS, decode=(DecodeAddress(url="http://n:2"),))
    assert decode_refusals(facts(disaggregation_mode="decode"), "http://n:2", pd, MODEL) == []
    (reason,) = decode_refusals(facts(), "http://n:2", pd, MODEL)
    assert "needed: 'decode'" in reason
    (reason,) = refusals(facts(), ADDRESS, pd, MODEL)
    assert "needed: 'prefill'" in reason


def test_two_boots_are_told_apart() -> None:
    again = facts_told()["startup_time"] | {"scheduler_e2e": 17.0001}
    assert facts().boot != facts(startup_time=again).boot
    assert facts().boot == facts().boot
    assert facts().life != facts(startup_time=again).life


def test_a_server_whose_lives_cannot_be_told_apart_is_none() -> None:
    with pytest.raises(ValidationError, match="startup_time"):
        facts(startup_time={})


def test_events_are_followed_where_the_server_is_reached() -> None:
    published = facts().kv_events
    assert published is not None
    assert published.address(5557, 3, "10.0.0.9") == "tcp://10.0.0.9:5560"
    assert published.model_copy(update={"endpoint_host": "10.1.1.1"}).address(1, 0, "x") == "tcp://10.1.1.1:1"


@pytest.mark.parametrize(
    ("host", "config", "url", "words"),
    [
        ("*", None, "http://n:1", None),
        ("10.1.1.1", '{"bind": true}', "http://n:1", None),
        ("10.1.1.1", '{"endpoint": "tcp://10.1.1.1:5557"}', "http://n:1", "connects to a host"),
        ("*", '{"format": "dynamo"}', "http://n:1", "format"),
        ("*", None, "http://[::1]:1", "IPv4 alone"),
    ],
)
def test_a_server_whose_events_would_not_be_heard_is_refused(
    host: str, config: str | None, url: str, words: str | None
) -> None:
    told = facts_told()["kv_events"] | {"endpoint_host": host}
    found = refusals(facts(kv_events=told, kv_events_config=config), ServerAddress(url=url, degree=1), SETTINGS, MODEL)
    assert all(words is not None and words in each for each in found)
    assert len(found) == bool(words)


def test_a_model_s_directory_says_what_the_pool_must_know(tmp_path: Path) -> None:
    assert read_model(write_tiny_model(tmp_path / "m", "qwen3", context=4096)) == MODEL
    with pytest.raises(EngineError, match=r"no readable config\.json"):
        read_model(tmp_path)
    for text in (
        "[]",
        '{"text_config": 3}',
        '{"architectures": null}',
        '{"architectures": ["A"], "vocab_size": "many"}',
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(EngineError, match=r"config\.json: "):
            read_model(tmp_path)


# --- settings


def test_workers_and_units_follow_from_servers() -> None:
    pair = tuple(ServerAddress(url=f"http://n:{port}", degree=2) for port in (1, 2))
    fixed = replace(SETTINGS, servers=pair)
    assert (fixed.prefill_ranks, fixed.units, fixed.degrees) == (4, 2, (2,))
    adaptive = replace(SETTINGS, servers=(ServerAddress(url="http://n:1", degree=4),), adaptive=True)
    assert (adaptive.prefill_ranks, adaptive.units, adaptive.degrees) == (4, 4, (1, 2, 4))


@pytest.mark.parametrize(
    ("servers", "decode", "adaptive", "words"),
    [
        ((), (), False, "0 servers"),
        ((("http://a:1", 1, None), ("http://b:1", 2, None)), (), False, "give each degree a node"),
        ((("http://a:1", 1, None), ("http://b:1", 1, None)), (), True, "one server over all its GPUs"),
        ((("http://a:1", 1, None),), ("http://d:1",), False, "bootstrap_port is missing"),
        ((("http://a:1", 1, 8998),), (), False, "no decode server is named"),
        ((("http://a:1", 1, None), ("http://a:1", 1, None)), (), False, "named twice"),
    ],
)
def test_sets_of_servers_that_make_no_node(
    servers: tuple[tuple[str, int, int | None], ...], decode: tuple[str, ...], adaptive: bool, words: str
) -> None:
    prefill = tuple(ServerAddress(url=url, degree=degree, bootstrap_port=port) for url, degree, port in servers)
    reason = why_not(prefill, tuple(DecodeAddress(url=url) for url in decode), adaptive=adaptive)
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(
    "url",
    ["10.0.0.1:30000", "ftp://n:1", "http://", "http://n:1/v1", "http://me:secret@n:1", "http://n:1?a", "http://n m:1"],
)
def test_an_address_is_a_host_and_a_port(url: str) -> None:
    with pytest.raises(ValidationError, match="HOST:PORT"):
        ServerAddress(url=url, degree=1)


@pytest.mark.parametrize(
    ("url", "words"),
    [("http://n:x", "Port"), ("http://n:65536", "Port"), ("http://n:0", "PORT"), ("http://[::1", "URL")],
)
def test_a_port_is_one(url: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DecodeAddress(url=url)


def test_a_degree_is_one_of_the_lattice() -> None:
    with pytest.raises(ValidationError, match=r"3 is none of \[1, 2, 4, 8\]"):
        ServerAddress(url="http://n:1", degree=3)


def test_a_worker_s_environment_names_its_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VERTUMNUS_ENGINE", "sglang")
    monkeypatch.setenv("VERTUMNUS_MODEL_DIR", str(tmp_path))
    monkeypatch.setenv("VERTUMNUS_SGLANG_SERVERS", '[{"url": "http://n:1", "degree": 2, "bootstrap_port": 8998}]')
    monkeypatch.setenv("VERTUMNUS_SGLANG_DECODE", '[{"url": "http://n:2"}]')
    with pytest.raises(ValidationError, match="blocks_per_rank: the sglang engine needs it"):
        WorkerSettings()
    monkeypatch.setenv("VERTUMNUS_BLOCKS_PER_RANK", "4096")
    asked = WorkerSettings().sglang()
    assert (asked.servers[0].bootstrap_port, asked.decode[0].url, asked.prefill_ranks) == (8998, "http://n:2", 2)
    key = tmp_path / "key"
    monkeypatch.setenv("VERTUMNUS_SGLANG_KEY_FILE", str(key))
    key.write_text("k3y-_.\n")
    assert WorkerSettings().sglang().key == "k3y-_."
    for held in ("the\nkey", "the key", "clé"):
        key.write_text(held)
        with pytest.raises(ValidationError, match=r"sglang_key_file\n.*one word of ASCII") as refused:
            WorkerSettings()
        assert held not in str(refused.value)
    key.write_text("key")
    monkeypatch.setenv("VERTUMNUS_SGLANG_DECODE", "[]")
    with pytest.raises(ValidationError, match="sglang_decode: no decode server is named"):
        WorkerSettings()
