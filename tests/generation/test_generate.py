import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, VOCAB, tiny_model

from gptlite.config import SamplingConfig
from gptlite.errors import UserError
from gptlite.generation import generate as generate_module
from gptlite.generation.generate import generate, prepare
from gptlite.machine.mesh import is_whole, make_mesh, place as placed
from gptlite.models.gpt import GPT
from gptlite.nn import WHOLE_SEQUENCE, Attention, Heads, Linear
from gptlite.nn.stack import unstacked

C = TINY.context_length
forward = eqx.filter_jit(lambda model, ids: model(ids))
GREEDY = SamplingConfig(greedy=True)


def seen_from(prompt: int, place: int) -> int:
    """Where the stretch of text starts that the token at `place` is drawn from, by the rule in
    `gptlite.generation.generate`: a full context is cut to its last half before it is added to."""
    start = 0
    for end in range(prompt, place):  # the token at `end` is added to the text from `start`
        if end - start == C:
            start = end - C // 2
    return start


@pytest.mark.parametrize("prompt", [1, C])
def test_a_prompt_may_have_one_token_or_fill_the_context(prompt):
    check_greedy_generation(tiny_model(), prompt)


def test_greedy_generation_is_the_uncached_argmax(variant):
    check_greedy_generation(variant, 5)


def check_greedy_generation(variant, prompt):
    """Far beyond the context."""
    text = jax.random.randint(jax.random.key(0), (2, prompt), 0, VOCAB)
    new = generate(variant, text, 3 * C, GREEDY, keys=jax.random.split(jax.random.key(0), 2))
    text = np.concatenate([text, new], axis=1)
    for place in range(prompt, prompt + 3 * C):
        window = text[:, seen_from(prompt, place) : place]
        padded = np.pad(window, ((0, 0), (0, C - window.shape[1])))
        logits = forward(variant, jnp.asarray(padded))[:, window.shape[1] - 1]
        chosen = np.take_along_axis(np.asarray(logits), text[:, place, None], axis=-1)[:, 0]
        # The cached program may round otherwise, and then take the other of two near equals.
        np.testing.assert_allclose(chosen, logits.max(-1), atol=1e-4)


def test_cached_logits_are_the_uncached_ones_with_the_layers_apart():
    ids = jax.random.randint(jax.random.key(1), (2, C), 0, VOCAB)
    whole = forward(tiny_model(), ids)

    @eqx.filter_jit
    def extend(model, ids, cache):
        hidden, cache = model.extend(ids, cache)
        return model.logits(hidden), cache

    model = unstacked(tiny_model())
    for leading in [(2,), (), (1, 2)]:
        texts = ids.reshape(-1, C)[0] if leading == () else ids.reshape(*leading, C)
        wanted = whole[0] if leading == () else whole.reshape(*leading, C, -1)
        cache, parts = model.init_cache(leading), []
        for step in [3, 1, 1, C - 5]:
            done = int(cache.length)
            logits, cache = extend(model, texts[..., done : done + step], cache)
            parts.append(logits)
        assert int(cache.length) == C
        np.testing.assert_allclose(jnp.concatenate(parts, axis=-2), wanted, atol=1e-4)


def test_a_batch_gives_what_its_rows_give_alone():
    model = tiny_model()
    prompts = jax.random.randint(jax.random.key(0), (4, 3), 0, VOCAB)
    keys = jax.random.split(jax.random.key(1), 4)
    config = SamplingConfig(temperature=0.8, top_k=9, top_p=0.95)
    together = generate(model, prompts, 40, config, keys=keys)
    for row in range(4):
        alone = generate(model, prompts[row : row + 1], 40, config, keys=keys[row : row + 1])
        np.testing.assert_array_equal(alone[0], together[row])


class MappedLayers(eqx.Module):
    """Layers with stacked weights, mapped over."""

    layers: Linear

    def __init__(self, config, *, key):
        make = eqx.filter_vmap(lambda k: Linear(config.d_model, config.d_model, std=0.3, key=k))
        self.layers = make(jax.random.split(key, 3))

    def __call__(self, x):
        return jnp.mean(eqx.filter_vmap(lambda layer: layer(x))(self.layers), axis=0)


class NormedWeight(eqx.Module):
    """Another weight in each call."""

    layer: Linear

    def __init__(self, config, *, key):
        self.layer = Linear(config.d_model, config.d_model, std=0.3, key=key)

    def __call__(self, x):
        weight = self.layer.weight / jnp.linalg.norm(self.layer.weight)
        return eqx.tree_at(lambda layer: layer.weight, self.layer, weight)(x)


class CountingAttention(eqx.Module):
    """Two heads of attention, by `vmap`, that count their calls: a cache without an axis of
    rows."""

    attention: Attention

    def __init__(self, config, *, key):
        def make(key):
            return Attention(Heads(config.d_model, 1, std=0.3, output_std=0.3, key=key))

        self.attention = eqx.filter_vmap(make)(jax.random.split(key, 2))

    def init_cache(self, batch, capacity, dtype):
        one = jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, self.attention)
        cache = one.init_cache(batch, capacity, dtype)
        return jax.tree.map(lambda x: jnp.stack([x, x]), cache), jnp.zeros((), jnp.int32)

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        if cache is None:
            return eqx.filter_vmap(lambda a: a(x, None, context)[0])(self.attention).mean(0), None
        keys_and_values, count = cache
        y, new = eqx.filter_vmap(lambda a, c: a(x, c, context))(self.attention, keys_and_values)
        return y.mean(0), (new, count + 1)


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize(
    "custom",
    [{"mlp": MappedLayers}, {"mlp": NormedWeight}, {"attention": CountingAttention}],
    ids=str,
)
def test_custom_parts_generate_in_a_batch_what_they_generate_alone(custom, rows):
    model, keys = tiny_model(**custom), jax.random.split(jax.random.key(1), rows)
    prompts = jax.random.randint(jax.random.key(0), (rows, 3), 0, VOCAB)
    together = generate(model, prompts, 2 * C, keys=keys)
    alone = generate(model, prompts[1:2], 2 * C, keys=keys[1:2])
    np.testing.assert_array_equal(alone[0], together[1])


def test_what_was_generated_on_several_devices_is_used_on_one():
    arrays, rest = eqx.partition(tiny_model(), eqx.is_array)
    model = eqx.combine(jax.device_put(arrays, jax.devices()[0]), rest)
    keys = jax.device_put(jax.random.split(jax.random.key(1), 2), jax.devices()[0])
    prompts = jnp.zeros((2, 3), jnp.int32)
    assert prepare(model, 2).mesh is not None
    new = generate(model, prompts, 5, keys=keys)
    assert forward(model, new).shape == (2, 5, VOCAB)
    keys = jax.random.split(jax.random.key(1), 2)
    with jax.set_mesh(make_mesh()):
        np.testing.assert_array_equal(generate(tiny_model(), prompts, 5, keys=keys), new)
    moved = eqx.combine(jax.device_put(arrays, jax.devices()[1]), rest)
    assert prepare(moved, 2).mesh is None


@pytest.mark.parametrize(("rows", "devices"), [(1, None), (3, None), (4, 2)])
def test_devices_share_the_rows_of_a_model_that_each_can_copy(rows, devices, monkeypatch):
    model, keys = tiny_model(), jax.random.split(jax.random.key(1), rows)
    prompts = jax.random.randint(jax.random.key(0), (rows, 3), 0, VOCAB)
    prepared = prepare(model, rows)
    assert (prepared.mesh and prepared.mesh.size) == devices
    shared = generate(prepared, prompts, 40, keys=keys)
    np.testing.assert_array_equal(generate(model, prompts, 40, keys=keys), shared)
    if devices:
        with pytest.raises(UserError, match="must be a multiple of 2, got 3"):
            generate(prepared, prompts[:3], 5, keys=keys[:3])
    monkeypatch.setattr("gptlite.machine.mesh.MAX_COPIED", 0)
    assert prepare(model, rows).mesh is None
    np.testing.assert_array_equal(generate(model, prompts, 40, keys=keys), shared)


def test_a_model_that_is_cut_over_devices_generates_what_it_generates_whole():
    model, keys = tiny_model(), jax.random.split(jax.random.key(1), 2)
    prompts = jax.random.randint(jax.random.key(0), (2, 3), 0, VOCAB)
    cut = placed(model, make_mesh(fsdp=2))
    assert not is_whole(cut)
    assert prepare(cut, 2).mesh is None
    np.testing.assert_array_equal(
        generate(cut, prompts, 2 * C, GREEDY, keys=keys),
        generate(model, prompts, 2 * C, GREEDY, keys=keys),
    )


@pytest.mark.parametrize("changes", [{}, {"stack": "scan", "n_kv_heads": 1}], ids=str)
def test_prompts_of_different_lengths_share_a_batch(changes):
    """Far beyond the context, which each row fills at another time."""
    model = tiny_model(**changes)
    prompts = jax.random.randint(jax.random.key(0), (3, C), 0, VOCAB)
    lengths, keys = np.array([C, 1, 5]), jax.random.split(jax.random.key(1), 3)
    together = generate(model, prompts, 40, lengths=lengths, keys=keys)
    for row, length in enumerate(lengths):
        prompt, key = prompts[row : row + 1, :length], keys[row : row + 1]
        np.testing.assert_array_equal(generate(model, prompt, 40, keys=key)[0], together[row])
    wide = jnp.pad(prompts, ((0, 0), (0, C)))
    np.testing.assert_array_equal(generate(model, wide, 40, lengths=lengths, keys=keys), together)
    unknown = np.where(np.arange(wide.shape[1]) < lengths[:, None], wide, -1)
    np.testing.assert_array_equal(
        generate(model, unknown, 40, lengths=lengths, keys=keys), together
    )


@pytest.mark.parametrize("changes", [{}, {"positions": "learned"}], ids=str)
def test_a_long_prompt_is_read_in_parts(changes, monkeypatch):
    """And the last half of a full context. The context, 18, is no multiple of a part."""
    model = tiny_model(context_length=18, **changes)
    prompts = jax.random.randint(jax.random.key(0), (4, 18), 0, VOCAB)
    lengths, keys = np.array([18, 1, 8, 11]), jax.random.split(jax.random.key(1), 4)
    whole = generate(model, prompts, 40, lengths=lengths, keys=keys)
    monkeypatch.setattr(generate_module, "MAX_PREFILL", 4)
    in_parts = generate(model, prompts, 40, lengths=lengths, keys=keys)
    np.testing.assert_array_equal(in_parts, whole)
    np.testing.assert_array_equal(generate(model, prompts[:1], 40, keys=keys[:1]), whole[:1])


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_keys_of_another_kind_give_each_row_a_text_of_its_own(kind):
    model, prompts = tiny_model(), jnp.zeros((4, 3), jnp.int32)
    keys = jax.vmap(lambda seed: jax.random.key(seed, impl=kind))(jnp.arange(4))
    texts = generate(model, prompts, 2 * C, keys=keys)
    assert len(np.unique(texts, axis=0)) == 4
    np.testing.assert_array_equal(generate(model, prompts, 2 * C, keys=keys), texts)


def test_generation_inside_jit_is_refused():
    """It compiles programs of its own."""
    model, keys = tiny_model(), jax.random.split(jax.random.key(1), 2)
    with pytest.raises(UserError, match="outside of jit"):
        jax.jit(lambda prompt: generate(model, prompt, 5, keys=keys))(jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(UserError, match="outside of jit"):
        eqx.filter_jit(lambda model: prepare(model, 2))(model)


def test_no_prompts_give_no_texts():
    none = jnp.zeros((0, 3), jnp.int32)
    new = generate(tiny_model(), none, 5, keys=jax.random.split(jax.random.key(0), 0))
    assert new.shape == (0, 5)


def test_padding_of_a_prompt_changes_nothing(monkeypatch):
    model, keys = tiny_model(), jax.random.key(0)[None]
    for length in (1, 3, 5):
        prompt = jax.random.randint(jax.random.key(length), (1, length), 0, VOCAB)
        whole = generate(model, prompt, 2 * C, keys=keys)
        with monkeypatch.context() as patch:
            patch.setattr("gptlite.generation.generate.MIN_PREFILL", 2)
            np.testing.assert_array_equal(generate(model, prompt, 2 * C, keys=keys), whole)


def test_the_same_key_gives_the_same_text_and_another_another():
    model = tiny_model()
    prompt = jnp.zeros((1, 1), jnp.int32)
    first, again, other = (
        generate(model, prompt, 50, keys=jax.random.key(seed)[None]) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_longer_text_begins_as_the_shorter_one():
    model = tiny_model()
    prompt, keys = jnp.zeros((1, 2), jnp.int32), jax.random.key(0)[None]
    long, short = (generate(model, prompt, n, keys=keys) for n in (70, 33))
    np.testing.assert_array_equal(long[:, :33], short)


def test_padded_ids_are_never_sampled():
    abstract = tiny_model()
    rows = jnp.ones((64, TINY.d_model))
    model = eqx.tree_at(
        lambda m: (m.embedding.weight, m.head.weight), abstract, (rows, -rows.at[VOCAB:].mul(-9))
    )
    new = generate(
        model, jnp.zeros((3, 1), jnp.int32), 60, keys=jax.random.split(jax.random.key(0), 3)
    )
    assert int(new.max()) < VOCAB


@pytest.mark.parametrize("length", [0, C + 1])
def test_a_prompt_that_does_not_fit_is_refused(length):
    with pytest.raises(UserError, match=f"1 to {C} tokens .*got {length}"):
        generate(tiny_model(), jnp.zeros((1, length), jnp.int32), 5, keys=jax.random.key(0)[None])


@pytest.mark.parametrize("wrong", [-1, VOCAB, 99999])
def test_an_id_beyond_the_vocabulary_is_refused(wrong):
    with pytest.raises(UserError, match=f"from 0 to {VOCAB - 1}, .* got {wrong}"):
        generate(tiny_model(), np.array([[0, wrong]]), 5, key=jax.random.key(0))


def test_a_number_of_tokens_below_0_is_refused():
    with pytest.raises(UserError, match="max_new_tokens must be 0 or more, got -1"):
        generate(tiny_model(), np.array([[0]]), -1, key=jax.random.key(0))


def test_lengths_beyond_the_prompt_are_refused():
    keys = jax.random.split(jax.random.key(0), 2)
    with pytest.raises(UserError, match=r"lengths must be at most 4, .*got 5"):
        generate(tiny_model(), jnp.zeros((2, 4), int), 5, lengths=np.array([5, 1]), keys=keys)


def test_a_context_of_one_token_goes_on():
    model = tiny_model(context_length=1)
    new = generate(model, jnp.zeros((1, 1), jnp.int32), 5, GREEDY, keys=jax.random.key(0)[None])
    text = [0, *new[0].tolist()]
    for before, after in itertools.pairwise(text):
        assert after == int(forward(model, jnp.array([before]))[0].argmax())


def test_the_cache_is_as_long_as_the_text_that_is_asked_for(monkeypatch):
    """Not as the context, which a config from a stranger may claim to be of any length."""
    prompt, keys = jnp.ones((1, 3), jnp.int32), jax.random.split(jax.random.key(0), 1)
    shapes = []
    monkeypatch.setattr(
        GPT,
        "init_cache",
        lambda self, *batch, init=GPT.init_cache, **words: (
            shapes.append(words["capacity"]) or init(self, *batch, **words)
        ),
    )
    long, short = (
        generate(tiny_model(context_length=length), prompt, 20, GREEDY, keys=keys)
        for length in (10_000_000, 32)
    )
    assert set(shapes) == {32}
    np.testing.assert_array_equal(long, short)


def test_texts_that_do_not_fit_into_memory_are_refused(monkeypatch):
    """Three caches, attention's scores, and the prepared copy of a model if there is none yet."""
    model = tiny_model(context_length=2**23, positions="none", n_layers=2)
    monkeypatch.setattr("gptlite.machine.memory.free_memory", lambda: 2**20)
    prompt, keys = jnp.ones((1, 3), jnp.int32), jax.random.split(jax.random.key(0), 1)

    def refused(gigabytes, model, new_tokens):
        with pytest.raises(UserError, match=f"takes {gigabytes:,.1f} GiB, and 0.0 GiB are free"):
            generate(model, prompt, new_tokens, GREEDY, keys=keys)

    # Keys and values of two layers, with the width 16 in float32; and the ids.
    caches = 3 * 4 * (2 * 2 * TINY.d_model + 1) / 2**30
    scores = TINY.n_heads * 4 / 2**30
    refused(2**23 * (caches + 16 * scores), model, 2**23 - 3)
    # The last half of the context is read again.
    refused(2**23 * (caches + 512 * scores), model, 2**23)
    refused(2**17 * (caches + 16 * scores), model, 2**17 - 3)
    wide = eqx.tree_at(lambda m: m.embedding.weight, model, jnp.zeros((2**20, 32)))
    refused(2**20 * 32 * 4 / 2**30, wide, 5)


def test_tokens_beyond_the_room_in_a_cache_are_refused():
    model = tiny_model()
    cache = model.init_cache((2,))
    extend = eqx.filter_jit(lambda model, ids, cache: model.extend(ids, cache))
    _, cache = extend(model, jnp.ones((2, C - 1), jnp.int32), cache)
    with pytest.raises(UserError, match=f"room for {C} tokens: {C - 1} are in it, got 2 more"):
        model.extend(jnp.ones((2, 2), jnp.int32), cache)
