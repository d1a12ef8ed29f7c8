"""Whatever does not fit is said at once and in full."""

from typing import Any

import pytest

from services.worker.engine.sglang.plugin import fitness

GOOD: dict[str, Any] = {name: wanted for name, (wanted, _) in {**fitness.SETTINGS, **fitness.ENVIRONMENT}.items()}


def test_every_missing_target_is_named() -> None:
    targets = ("json:loads", "json:JSONDecoder.decode", "json:gone", "json:JSONDecoder.gone", "no_such_module:x")
    found = fitness.missing("0.5.24", targets)
    assert found[0] == "SGLang is 0.5.24; the plug-in is made for 0.5.23"
    assert [line.partition(" ")[0] for line in found[1:]] == ["json:gone", "json:JSONDecoder.gone", "no_such_module:x"]
    assert fitness.missing(fitness.VERSION, targets[:2]) == []


def test_settings_that_fit_are_not_refused() -> None:
    assert fitness.refuse_settings(GOOD) == []
    assert fitness.refuse_settings({**GOOD, "enable_lora": False}) == []


@pytest.mark.parametrize("name", GOOD)
def test_each_setting_that_does_not_fit_is_refused(name: str) -> None:
    wrong = 2 if GOOD[name] else True
    (refusal,) = fitness.refuse_settings({**GOOD, name: wrong})
    assert refusal.startswith(f"{name} is {wrong!r} and must be {GOOD[name]!r}: ")


def test_models_are_refused_by_name_and_reason() -> None:
    assert fitness.refuse_model(["Qwen3ForCausalLM"]) is None
    assert fitness.refuse_model(["Qwen3MoeForCausalLM"]) is None
    refusal = fitness.refuse_model(["DeepseekV3ForCausalLM"])
    assert refusal is not None
    assert "DeepseekV3ForCausalLM" in refusal
    assert "experts are spread" in refusal
    assert "laid out by the degree" in str(fitness.refuse_model(["LlamaForCausalLM"]))
    assert "no known architecture" in str(fitness.refuse_model([]))
