"""Tools in a chat: what reaches the template, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from router_app import served
from router_pool import write_model_dir

from services.router.openai import BadRequest, ChatRequest, parse, read
from services.router.tokenizer import ModelText

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
ASKED: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "Look."}], "tools": [LOOK]}
TEMPLATE = "{{ tools | tojson if tools }}{% for m in messages %}{{ m | tojson }}{% endfor %}"


def asked(**changes: Any) -> ChatRequest:
    return parse(ChatRequest, read(json.dumps({**ASKED, **changes}).encode()))


def test_a_call_and_its_answer_are_turns() -> None:
    turns = asked(
        messages=[
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "There."},
        ]
    ).turns()
    assert turns[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "it"}}
    assert (turns[1]["content"], turns[2]["tool_call_id"]) == ("", "c1")


def test_no_tools_are_told_of_if_none_is_to_be_called() -> None:
    assert asked().told_tools() == [LOOK]
    assert asked(tool_choice="none").told_tools() == asked(tools=None).told_tools() == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [LOOK] * 129}, "tools"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
    ],
)
def test_what_is_not_served_is_named(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        asked(**changes)
    assert (refused.value.status, str(refused.value.param)) == (400, param)


DEEP = "[" * 100_000


def test_arguments_too_deep_to_be_read_are_told_as_they_came() -> None:
    call = {**CALL, "function": {"name": "look", "arguments": DEEP}}
    [turn] = asked(messages=[{"role": "assistant", "tool_calls": [call]}]).turns()
    assert turn["tool_calls"][0]["function"]["arguments"] == DEEP


async def test_arguments_that_a_template_cannot_take_apart_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    write_model_dir(directory)
    path = directory / "tokenizer_config.json"
    each = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | items | list }}{% endfor %}{% endfor %}"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": each}))
    statuses = []
    async with served(tmp_path, text=ModelText(directory)) as (_, client):
        for given in ('{"at": "it"}', "[1]", "no JSON"):
            call = {**CALL, "function": {"name": "look", "arguments": given}}
            messages = [{"role": "assistant", "tool_calls": [call]}]
            answer = await client.post(
                "/v1/chat/completions", json={"model": "toy", "messages": messages, "max_tokens": 2}
            )
            statuses.append((answer.status_code, answer.json().get("error", {}).get("param")))
    assert statuses == [(200, None), (400, "messages"), (400, "messages")]


async def test_a_template_without_tools_refuses_them(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    write_model_dir(directory)
    statuses = []
    for template in ("{{ messages[0].content }}", TEMPLATE):
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
        async with served(tmp_path, text=ModelText(directory)) as (_, client):
            answer = await client.post("/v1/chat/completions", json={**ASKED, "max_tokens": 2})
            statuses.append((answer.status_code, answer.json().get("error", {}).get("param")))
    assert statuses == [(400, "tools"), (200, None)]
