"""Chats, for models whose tokenizer has a template."""

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from conftest import tiny_model
from support.servers import NAME, post, serving

from gptlite.errors import UserError
from gptlite.generation.generate import generate
from gptlite.hugging_face.tokenizer import HFTokenizer
from gptlite.serving import chat as chat_module
from gptlite.serving.api import WITHOUT, Chat, Completion, parse
from gptlite.serving.chat import read_chat_template
from gptlite.text.tokenizer import CharTokenizer

openai = pytest.importorskip("openai")
completion_params = pytest.importorskip("openai.types.completion_create_params")
chat_params = pytest.importorskip("openai.types.chat.completion_create_params")
# Characters and two special tokens: 13 ids, as many as the tiny model has.
SPECIAL = ["<s>", "</s>"]
# Characters of a chat.
MOST = 2**24
TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}{% endif %}"
)


@pytest.fixture(name="tokenizer")
def fixture_tokenizer() -> HFTokenizer:
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate("abcdefghijk")}, merges=[])
    )
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens([tokenizers.AddedToken(x, special=True) for x in SPECIAL])
    return HFTokenizer(made.to_str(), end_ids=[12])


def write(folder, template: Any = TEMPLATE):
    record = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(record))


def test_the_template_makes_ids_with_special_tokens(tokenizer, tmp_path):
    assert read_chat_template(tmp_path, tokenizer) is None
    write(tmp_path)
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d"}]
    wanted = [11, 0, 1, 2, 12, 11, 3, 12, 11]
    chat = read_chat_template(tmp_path, tokenizer)
    assert chat is not None
    assert chat.encode(messages, MOST) == wanted
    others = [{"name": "tools", "template": "x"}, {"name": [], "template": {}}, 3]
    write(tmp_path, [*others, {"name": "default", "template": TEMPLATE}])
    chat = read_chat_template(tmp_path, tokenizer)
    assert chat is not None
    assert chat.encode(messages, MOST) == wanted
    (tmp_path / "chat_template.jinja").write_text("ab{{ messages[0].content }}")
    chat = read_chat_template(tmp_path, tokenizer)
    assert chat is not None
    assert chat.encode(messages, MOST) == [0, 1, 0, 1, 2]
    assert read_chat_template(tmp_path, CharTokenizer("ab")) is None
    write(tmp_path, None)
    (tmp_path / "chat_template.jinja").unlink()
    assert read_chat_template(tmp_path, tokenizer) is None


def test_a_chat_of_any_number_of_messages_is_refused(tokenizer, tmp_path):
    write(tmp_path, "{{ messages | length }}")
    chat = read_chat_template(tmp_path, tokenizer)
    assert chat is not None
    asked = {"model": NAME, "messages": [{"role": "user", "content": ""}] * 2049}
    with serving(tiny_model(), tokenizer=tokenizer, chat=chat) as address:
        _, answer, _ = post(address, json.dumps(asked), "/v1/chat/completions")
    assert answer["error"]["message"] == "A chat may have 2,048 messages, got 2,049."


def test_what_the_model_does_not_know_is_refused(tokenizer, tmp_path):
    write(tmp_path, "<pad>{{ messages[0].content }}")
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json()["tokenizer"])
    library.add_special_tokens(["<pad>"])
    more = HFTokenizer(library.to_str(), tokenizer.vocab_size)
    chat = read_chat_template(tmp_path, more)
    assert chat is not None
    with pytest.raises(UserError, match=r"Ids must be from 0 to 12, got \[13\]"):
        chat.encode([{"role": "user", "content": "ab"}], MOST)
    with pytest.raises(UserError, match=r"The character 'é' .* does not come back"):
        chat.encode([{"role": "user", "content": "ab\u0065\u0301"}], MOST)


def test_a_chat_that_cannot_fit_is_not_encoded(tokenizer, tmp_path):
    write(tmp_path)
    chat = read_chat_template(tmp_path, tokenizer)
    assert chat is not None
    asked = {"model": NAME, "messages": [{"role": "user", "content": "ab" * 10_000}]}
    with serving(tiny_model(), tokenizer=tokenizer, chat=chat) as address:
        _, answer, _ = post(address, json.dumps(asked), "/v1/chat/completions")
    assert re.match("A chat that fits .* at most .* characters, got", answer["error"]["message"])


NESTED = "{% for a in messages %}" * 25 + "{% endfor %}" * 25


@pytest.mark.processes
@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ (7 ** 99999999) ** 99 }}", "took more than"),
        ("{{ 'a' * 6000000000 }}", "took more than"),
        (NESTED, "has an error: SyntaxError"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "has an error: RecursionError"),
        ("a" * 2**21, "has 2,097,152 characters"),
    ],
)
def test_a_template_that_breaks_its_limits_is_not_compiled(
    tokenizer, tmp_path, template, sentence, monkeypatch
):
    monkeypatch.setattr(chat_module, "SECONDS", 1)
    write(tmp_path, template)
    with pytest.raises(UserError, match=sentence):  # Jinja leaves some of it to the first chat
        read_chat_template(tmp_path, tokenizer).encode([], MOST)  # pyright: ignore


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"


@pytest.mark.processes
@pytest.mark.parametrize("template", [ENDLESS, "{{ messages[0].content * 3000000000 }}"])
def test_a_template_that_breaks_its_limits_is_out_of_use_and_all_else_serves_on(
    tokenizer, tmp_path, template, monkeypatch
):
    monkeypatch.setattr(chat_module, "SECONDS", 1)
    write(tmp_path, template)
    chat = read_chat_template(tmp_path, tokenizer)
    assert chat is not None
    asked = {"model": NAME, "messages": [{"role": "user", "content": "ab"}]}
    with serving(tiny_model(), tokenizer=tokenizer, chat=chat) as address:
        for _ in range(2):  # the second one at once
            _, answer, _ = post(address, json.dumps(asked), "/v1/chat/completions")
            assert answer["error"]["message"].startswith("The model's chat template took more")
        _, completion, _ = post(address, json.dumps({"model": NAME, "prompt": "ab"}))
        assert completion["choices"][0]["finish_reason"] in ("stop", "length")
    assert chat._process._process.poll() is not None


def test_a_text_that_is_too_long_is_refused_and_the_template_stays(tokenizer, tmp_path):
    write(tmp_path, "{{ messages[0].content * messages[0].content|length * 200000 }}")
    chat = read_chat_template(tmp_path, tokenizer)
    assert chat is not None
    with pytest.raises(UserError, match="the text would have 20,000,000 characters"):
        chat.encode([{"role": "user", "content": "a" * 10}], MOST)
    assert chat.encode([{"role": "user", "content": ""}], MOST) == []


def test_a_model_without_a_template_says_so(tokenizer):
    with serving(tiny_model(), tokenizer=tokenizer) as address:
        asked = {"model": NAME, "messages": [{"role": "user", "content": "ab"}]}
        _, answer, _ = post(address, json.dumps(asked), "/v1/chat/completions")
        error = answer["error"]
        assert "has no chat template. POST /v1/completions" in error["message"]
        assert error["code"] == "no_chat_template"


# What OpenAI's documentation gives as the default, of fields that the package does not have.
DEFAULTS = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {"1": 0},
    "suffix": "",
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "reasoning_effort": "medium",
    "verbosity": "medium",
    "store": False,
    "service_tier": "auto",
    "metadata": {"a": "b"},
    "user": "someone",
    "safety_identifier": "someone",
    "prompt_cache_key": "a",
    "stream_options": {"include_usage": None, "include_obfuscation": False},
    **{"n": 1, "stop": [], "temperature": 1, "top_p": 1, "top_logprobs": 0, "best_of": 1},
}
MESSAGES = [
    {"role": "developer", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "audio": None},
]


def fields_of(kind: Any) -> list[str]:
    return sorted(set(kind.__annotations__) - {"model", "messages"})


def body_of(kind: Any, **fields: Any) -> bytes:
    body = {"model": NAME} | ({"messages": MESSAGES} if kind is Chat else {})
    return json.dumps(body | fields).encode()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, theirs in ((Chat, chat_params), (Completion, completion_params))
        for name in fields_of(theirs.CompletionCreateParamsBase)
    ],
)
def test_every_field_of_openais_clients_may_be_null_or_the_default(kind, name):
    assert parse(kind, body_of(kind, **{name: None})).model == NAME
    if name in DEFAULTS:
        parse(kind, body_of(kind, **{name: DEFAULTS[name]}))
        if WITHOUT[kind].get(name) is not None:
            with pytest.raises(UserError, match=f"{name} is not supported"):
                parse(kind, body_of(kind, **{name: "other"}))


@pytest.mark.parametrize("name", ["tool_calls", "function_call", "audio"])
def test_what_a_message_says_beyond_its_text_is_refused_by_its_name(name):
    messages = [{"role": "assistant", "content": "a", name: {"id": "x"}}]
    with pytest.raises(UserError, match=f"{name} in messages is not supported"):
        parse(Chat, body_of(Chat, messages=messages))
    messages[0][name] = None  # as in an answer that is sent back
    assert parse(Chat, body_of(Chat, messages=messages)).turns[0]["content"] == "a"


def test_a_template_is_given_the_names_of_those_who_write():
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "user", "content": "b"},
    ]
    turns = [messages[0], {"role": "user", "content": "b"}]
    assert parse(Chat, body_of(Chat, messages=[*messages])).turns == turns
    messages[1]["name"] = None
    assert parse(Chat, body_of(Chat, messages=messages)).turns == turns
    with pytest.raises(UserError, match="perhaps a name, all texts"):
        parse(Chat, body_of(Chat, messages=[messages[0] | {"name": 3}]))


def test_rivals_without_log_probabilities_are_refused():
    assert parse(Chat, body_of(Chat, logprobs=True, top_logprobs=2)).top_logprobs == 2
    with pytest.raises(UserError, match="top_logprobs needs logprobs: true, got 2 without"):
        parse(Chat, body_of(Chat, top_logprobs=2))


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('only users') }}", "refuses these messages: only users"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: .*unsafe"),
        ("{{ messages.append(1) }}", "refuses these messages: .*unsafe"),
        ("{{ unknown.field }}", "refuses these messages: .*undefined"),
        ("{{ 1 // 0 }}", "refuses these messages: .*zero"),
    ],
)
def test_a_template_can_refuse_and_do_nothing_else(tokenizer, tmp_path, template, sentence):
    write(tmp_path, template)
    chat = read_chat_template(tmp_path, tokenizer)
    assert chat is not None
    with pytest.raises(UserError, match=sentence):
        chat.encode([{"role": "user", "content": "a"}], MOST)


def test_a_template_finds_what_it_finds_elsewhere(tokenizer, tmp_path):
    """As transformers 5.24 renders it."""
    write(
        tmp_path,
        "{% generation %}{% if tools is none and documents is none %}a{% endif %}"
        "{% endgeneration %}{{ {'b': 'é<', 'a': 1} | tojson }}",
    )
    chat = read_chat_template(tmp_path, tokenizer)
    assert chat is not None
    assert chat._process.ask([])["text"] == 'a{"b": "é<", "a": 1}'


def test_a_broken_template_is_refused(tokenizer, tmp_path):
    write(tmp_path, "{% for %}")
    with pytest.raises(UserError, match="chat template has an error"):
        read_chat_template(tmp_path, tokenizer)


def test_a_chat_is_answered(tokenizer, tmp_path):
    write(tmp_path)
    model = tiny_model()
    chat = read_chat_template(tmp_path, tokenizer)
    assert chat is not None
    prompt = [11, 0, 1, 2, 12, 11]
    key = jax.random.fold_in(jax.random.key(1, impl="threefry2x32"), 0)[None]
    ids = np.asarray(generate(model, jnp.asarray([prompt]), 200, keys=key)[0])
    end = int(np.argmax(ids == 12))
    text = tokenizer.decode(ids[:end])
    asked = {"model": NAME, "messages": [{"role": "user", "content": "abc"}], "seed": 1}
    with (
        serving(model, tokenizer=tokenizer, chat=chat) as address,
        openai.OpenAI(base_url=address.url, api_key="none", max_retries=0) as client,
    ):
        create = client.chat.completions.create
        answer = create(**asked, max_tokens=200, logprobs=True, top_logprobs=2)
        (choice,) = answer.choices
        assert (choice.message.content, choice.message.role) == (text, "assistant")
        assert choice.finish_reason == "stop"
        assert answer.usage.prompt_tokens == len(prompt)
        content = choice.logprobs.content
        assert "".join(token.token for token in content) == text
        assert all(len(token.top_logprobs) == 2 for token in content)
        pieces = list(create(**asked, max_completion_tokens=200, stream=True))
        assert "".join(piece.choices[0].delta.content for piece in pieces) == text
        assert pieces[-1].choices[0].finish_reason == "stop"
        roles = [piece.choices[0].delta.role for piece in pieces]
        assert roles == ["assistant", *[None] * (len(pieces) - 1)]
        parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
        given = asked | {"messages": [{"role": "user", "content": parts}]}
        assert create(**given).choices[0].message.content == text
        assert create(**asked).choices[0].message.content == text
        for messages in ([], ["a"], [{"role": "user"}], [{"role": "user", "content": 5}]):
            with pytest.raises(openai.BadRequestError, match="messages must be a list of objects"):
                create(model=NAME, messages=messages)
