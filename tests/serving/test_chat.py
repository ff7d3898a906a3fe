"""Chats, for models whose tokenizer has a template."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from conftest import tiny_model
from support.servers import NAME, serving

from gptlite.errors import UserError
from gptlite.generation.generate import generate
from gptlite.hugging_face.tokenizer import HFTokenizer
from gptlite.serving.chat import read_chat_template
from gptlite.text.tokenizer import CharTokenizer

openai = pytest.importorskip("openai")
# Characters and two special tokens: 13 ids, as many as the tiny model has.
SPECIAL = ["<s>", "</s>"]
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
    assert chat.encode(messages) == wanted
    write(tmp_path, [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}])
    chat = read_chat_template(tmp_path, tokenizer)
    assert chat is not None
    assert chat.encode(messages) == wanted
    (tmp_path / "chat_template.jinja").write_text("ab{{ messages[0].content }}")
    chat = read_chat_template(tmp_path, tokenizer)
    assert chat is not None
    assert chat.encode(messages) == [0, 1, 0, 1, 2]
    assert read_chat_template(tmp_path, CharTokenizer("ab")) is None
    write(tmp_path, None)
    (tmp_path / "chat_template.jinja").unlink()
    assert read_chat_template(tmp_path, tokenizer) is None


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
        chat.encode([{"role": "user", "content": "a"}])


def test_a_template_finds_what_it_finds_elsewhere(tokenizer, tmp_path):
    """As transformers 5.24 renders it."""
    write(
        tmp_path,
        "{% generation %}{% if tools is none and documents is none %}a{% endif %}"
        "{% endgeneration %}{{ {'b': 'é<', 'a': 1} | tojson }}",
    )
    chat = read_chat_template(tmp_path, tokenizer)
    assert chat is not None
    assert chat._template.render(messages=[]) == 'a{"b": "é<", "a": 1}'


def test_a_broken_template_is_refused(tokenizer, tmp_path):
    write(tmp_path, "{% for %}")
    with pytest.raises(UserError, match="chat template has an error"):
        read_chat_template(tmp_path, tokenizer)


def test_a_chat_is_answered(tokenizer, tmp_path):
    write(tmp_path)
    model = tiny_model()
    chat = read_chat_template(tmp_path, tokenizer)
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
