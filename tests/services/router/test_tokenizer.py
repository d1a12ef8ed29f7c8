"""A model directory becomes tokens and text: limits, templates that refuse or misbehave, and an event loop that goes on."""

import asyncio
import json
from pathlib import Path

import pytest
from router_pool import write_model_dir
from tokenizers import Tokenizer, decoders, models

from services.router.tokenizer import BadModelDirectory, ModelText, PromptTooLong, TemplateRefused, TextThreads

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model_dir(tmp_path / "model")


def with_template(directory: Path, template: object, **more: object) -> ModelText:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template, **more}))
    return ModelText(directory)


def test_text_goes_there_and_back(directory: Path) -> None:
    text = ModelText(directory)
    said = "Grüße, 世界! 👋"
    stream = text.stream(text.encode("x", 10))
    shown = [stream.push([token]) for token in text.encode(said, 100).tolist()]
    assert "".join(shown) + stream.flush() == said
    assert not any("\ufffd" in each for each in shown)


def test_the_bytes_of_tokens_are_those_of_the_text(directory: Path) -> None:
    text = ModelText(directory)
    said = "Grüße, 世界! 👋 <|im_end|>"
    tokens = [text.token_bytes(token) for token in text.encode(said, 100).tolist()]
    assert b"".join(tokens) == said.encode()
    assert max(map(len, tokens)) == len("<|im_end|>"), "the others are a byte each"
    assert text.token_bytes(1_999) == b" w1999", "an added one is written as it is"
    assert text.token_bytes(5_000) == b"", "nobody has named it"


def test_the_bytes_of_a_vocabulary_with_byte_fallback(directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"<0xE4>": 0, "<0xB8>": 1, "\u2581a": 2}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(directory / "tokenizer.json"))
    assert [ModelText(directory).token_bytes(token) for token in range(3)] == [b"\xe4", b"\xb8", b" a"]


def test_a_chat_ends_where_the_assistant_speaks(directory: Path) -> None:
    text = ModelText(directory)
    tokens = text.encode_chat(CHAT, 1_000)
    assert tokens.tolist() == text.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", 1_000).tolist()


def test_too_many_tokens_are_counted(directory: Path) -> None:
    with pytest.raises(PromptTooLong, match="the prompt has 11 tokens; at most 10 can be served"):
        ModelText(directory).encode("x" * 11, 10)


def test_text_that_cannot_fit_is_refused_unread(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ModelText(directory)
    monkeypatch.setattr(text, "_tokenizer", None)
    with pytest.raises(PromptTooLong, match="the prompt has 161 characters; at most 160 can be served"):
        text.encode("x" * 161, 10)


def test_stop_tokens_and_vocabulary(directory: Path) -> None:
    text = ModelText(directory)
    assert (text.stop_tokens, text.vocabulary) == ((258,), 2_000)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    assert ModelText(directory).stop_tokens == (257, 258)


def test_a_template_may_refuse(directory: Path) -> None:
    text = with_template(directory, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        text.encode_chat(CHAT, 100)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
    ],
)
def test_a_template_does_not_reach_python(directory: Path, template: str) -> None:
    with pytest.raises(TemplateRefused):
        with_template(directory, template).encode_chat(CHAT, 100)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<|im_start|>hello"),
        ("{{ messages[0].content | tojson }}", '"hello"'),
        ([{"name": "other", "template": "x"}, {"name": "default", "template": "y"}], "y"),
    ],
)
def test_forms_of_templates(directory: Path, template: object, expected: str) -> None:
    text = with_template(directory, template, bos_token={"content": "<|im_start|>"})
    assert text.encode_chat(CHAT, 100).tolist() == text.encode(expected, 100).tolist()


def test_a_template_in_a_file_comes_first(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("z")
    text = ModelText(directory)
    assert text.encode_chat(CHAT, 100).tolist() == text.encode("z", 100).tolist()


def test_tools_reach_a_template_that_knows_them(directory: Path) -> None:
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"
    text = with_template(directory, template)
    assert text.has_tools
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert text.encode_chat(CHAT, 100, tools).tolist() == text.encode(f"look {CHAT[0]['content']}", 100).tolist()
    assert text.encode_chat(CHAT, 100).tolist() == text.encode(CHAT[0]["content"], 100).tolist()
    assert not with_template(directory, "{{ messages[0].content }}").has_tools


def test_a_model_without_a_template_has_no_chat(directory: Path) -> None:
    assert ModelText(directory).has_chat
    assert not with_template(directory, None).has_chat


@pytest.mark.parametrize("broken", ["tokenizer.json", "config.json", "tokenizer_config.json"])
def test_a_broken_directory_names_the_file(directory: Path, broken: str) -> None:
    (directory / broken).write_text("[")
    with pytest.raises(BadModelDirectory, match=broken):
        ModelText(directory)
    (directory / broken).unlink()
    with pytest.raises(BadModelDirectory, match=broken):
        ModelText(directory)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "{}"),
        ("config.json", '{"vocab_size": "x"}'),
        ("config.json", '{"vocab_size": null}'),
        ("generation_config.json", '{"eos_token_id": ["x"]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", '{"chat_template": 7}'),
    ],
)
def test_a_directory_with_other_content_is_named(directory: Path, file: str, content: str) -> None:
    (directory / file).write_text(content)
    with pytest.raises(BadModelDirectory, match=str(directory)):
        ModelText(directory)


async def test_the_event_loop_goes_on_while_a_long_text_is_encoded(directory: Path) -> None:
    text, threads = ModelText(directory), TextThreads(1)
    encoding = asyncio.ensure_future(threads.run(text.encode, "word " * 200_000, 10**7))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.002)
        turns += 1
    assert len(await encoding)
    threads.close()
    assert turns > 5, "it took the loop for itself"
