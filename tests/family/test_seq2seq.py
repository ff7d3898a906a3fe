"""The encoder-decoder and the encoder, against the paper's formulas and all checks."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import drawn

from gptlite.config import ModelConfig
from gptlite.errors import UserError
from gptlite.family.beam_search import beam_search
from gptlite.family.cross_attention import CrossAttention
from gptlite.family.encoder import Encoder
from gptlite.family.presets import VASWANI
from gptlite.family.seq2seq import Seq2Seq, shift_right
from gptlite.inspect.attention_maps import attention_maps
from gptlite.inspect.flops import flops_per_token
from gptlite.inspect.summary import summary
from gptlite.machine.pytrees import count_parameters
from gptlite.nn import Attention, Heads
from gptlite.nn.stack import unstacked
from gptlite.research.check_block import check_block
from gptlite.research.laws import LAWS
from gptlite.research.subject import make_subject

VOCAB = 19
SMALL: dict[str, Any] = {"n_layers": 2, "n_heads": 2, "d_model": 16, "context_length": 9}
PAPER = dataclasses.replace(VASWANI, **SMALL)
ONE = dataclasses.replace(PAPER, n_layers=1)
OURS = ModelConfig(
    **SMALL,
    positions="sinusoidal",
    stack="scan",
    n_kv_heads=1,
    attention="full:qk_gain=true",
)
LESS = dataclasses.replace(OURS, n_layers=1)
# Softmax cancels a bias of the keys.
KEY_BIASES = [
    "encoder.stack.blocks.attention.heads.key.bias",
    "decoder.stack.blocks.attention.heads.key.bias",
    "decoder.stack.blocks.cross_attention.heads.key.bias",
]


def paper(config=PAPER, *, shared=True) -> Seq2Seq:
    return drawn(lambda key: Seq2Seq(config, VOCAB, VOCAB, share_embedding=shared, key=key))


def pairs():
    """Sources, how many of their ids are real, and targets."""
    random = np.random.default_rng(0)
    source, targets = random.integers(VOCAB, size=(3, 7)), random.integers(VOCAB, size=(3, 6))
    return source, np.array([7, 5, 1]), targets


def test_cross_attention_is_attention_to_what_was_read():
    layer = CrossAttention(
        drawn(lambda key: Heads(16, 4, n_kv_heads=2, std=0.5, output_std=0.5, key=key))
    )
    x = jax.random.normal(jax.random.key(1), (2, 3, 16))
    memory = jax.random.normal(jax.random.key(2), (2, 6, 16))
    reading = eqx.filter_jit(CrossAttention.read)
    read = reading(layer, memory, jnp.array([6, 2]))
    out = eqx.filter_jit(CrossAttention.__call__)(layer, x, read)
    weights = np.asarray(eqx.filter_jit(CrossAttention.weights)(layer, x, read))
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)
    assert not weights[1, ..., 2:].any()
    values = np.asarray(read.values).reshape(2, 2, 6, 4).repeat(2, axis=1)
    joined = (weights @ values).swapaxes(1, 2).reshape(2, 3, 16)
    wanted = joined @ np.asarray(layer.heads.output.weight).T
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    alone = layer(x[1], reading(layer, memory[1, :2]))
    np.testing.assert_allclose(out[1], alone, rtol=1e-4, atol=1e-5)


def reference(model: Seq2Seq, source, inputs):
    """Logits of one pair in float64, from the formulas of Vaswani et al., 2017."""

    def wide(tree):
        return jax.tree.map(lambda x: np.asarray(x, np.float64) if eqx.is_array(x) else x, tree)

    encoder, decoder = wide(model.encoder), wide(model.decoder)

    def layers(half):
        return wide(half.stack.unstack().blocks)

    d, heads = PAPER.d_model, PAPER.n_heads
    pre = model.config.block == "pre"

    def linear(layer, x):
        return x @ layer.weight.T + layer.bias

    def norm(layer, x):
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return centred / deviation * layer.weight + layer.bias

    def softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def attention(layer, x, memory, seen):  # section 3.2
        layer = layer.heads
        q, k, v = linear(layer.query, x), linear(layer.key, memory), linear(layer.value, memory)
        found = []
        for head in range(heads):
            part = slice(head * d // heads, (head + 1) * d // heads)
            scores = q[:, part] @ k[:, part].T / np.sqrt(d // heads)
            found.append(softmax(np.where(seen, scores, -np.inf)) @ v[:, part])
        return linear(layer.output, np.concatenate(found, axis=-1))

    def bidirectional(layer, x):
        return attention(layer, x, x, np.ones((len(x), len(x)), bool))

    def causal(layer, x):
        return attention(layer, x, x, np.tri(len(x), dtype=bool))

    def feed_forward(layer, x):  # equation 2
        return linear(layer.down, np.maximum(linear(layer.up, x), 0))

    def sublayer(residual, x, branch, layer):  # section 3.1; pre-norm: Xiong et al., 2020
        if pre:
            return x + branch(layer, norm(residual.norm, x))
        return norm(residual.norm, x + branch(layer, x))

    def embed(table, ids):  # sections 3.4 and 3.5
        t, i = np.arange(len(ids))[:, None], np.arange(d // 2)
        angle = t / 10000 ** (2 * i / d)
        positions = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(len(ids), d)
        return table[ids] * np.sqrt(d) + positions

    source_table = (decoder if model.shares_embedding else encoder).embedding.weight
    memory = embed(source_table, source)
    for block in layers(model.encoder):
        memory = sublayer(block.attention_residual, memory, bidirectional, block.attention)
        memory = sublayer(block.mlp_residual, memory, feed_forward, block.mlp)
    if pre:
        memory = norm(encoder.norm, memory)

    def to_memory(layer, x):
        return attention(layer, x, memory, np.ones((len(x), len(memory)), bool))

    x = embed(decoder.embedding.weight, inputs)
    for block in layers(model.decoder):
        x = sublayer(block.attention_residual, x, causal, block.attention)
        x = sublayer(block.cross_residual, x, to_memory, block.cross_attention)
        x = sublayer(block.mlp_residual, x, feed_forward, block.mlp)
    if pre:
        x = norm(decoder.norm, x)
    head = decoder.embedding.weight if decoder.head is None else decoder.head.weight
    return x @ head.T


@pytest.mark.parametrize("block", ["post", "pre"])
@pytest.mark.parametrize("shared", [True, False])
def test_logits_equal_the_papers_formulas(block, shared):
    """In float32 against float64: sums of a few hundred terms, each rounded to 6e-8."""
    config = dataclasses.replace(PAPER, block=block, tied_head=shared)
    model = paper(config, shared=shared)
    source, lengths, targets = pairs()
    inputs = shift_right(jnp.asarray(targets), 1)
    assert inputs[:, 0].tolist() == [1, 1, 1]
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    logits = eqx.filter_jit(model)(jnp.asarray(source), inputs, source_lengths=jnp.asarray(lengths))
    for row in range(3):
        wanted = reference(model, source[row, : lengths[row]], np.asarray(inputs[row]))
        assert np.abs(wanted).max() > 0.5
        np.testing.assert_allclose(logits[row], wanted, atol=1e-4 * np.abs(wanted).max())


def test_an_encoder_decoder_passes_all_checks():
    report = check_block(paper(ONE), zero_grad=KEY_BIASES)
    assert set(report.left_out) == {"sees", "reference"}
    silent = {"build", "documents", "auxiliary", "weights", "scan", "transfer"}
    assert set(report.does_not_apply) == silent


def test_grouped_queries_and_gains_pass_the_checks_of_an_encoder_decoder():
    model = drawn(lambda key: Seq2Seq(LESS, VOCAB, VOCAB + 2, key=key))
    checks = ["bidirectional", "cached"]
    assert list(check_block(model, checks=checks).checks) == checks


class Forgets(Seq2Seq):
    def __init__(self, *sizes, key):
        super().__init__(ONE, *sizes, key=key)

    def init_cache(self, source, source_lengths=None):
        return super().init_cache(source)


class Ignores(CrossAttention):
    def read(self, memory, lengths=None):
        return super().read(memory)


def heads_of(config, key):
    return Heads(config.d_model, 2, std=0.1, output_std=0.1, qkv_bias=True, key=key)


def with_direction(half: str, causal: bool) -> Seq2Seq:
    attention = getattr(paper(ONE), half).stack.blocks.attention
    return eqx.tree_at(
        lambda m: getattr(m, half).stack.blocks.attention,
        paper(ONE),
        dataclasses.replace(attention, causal=causal),
    )


def ignoring() -> Seq2Seq:
    model: Any = paper(ONE)
    layer = model.decoder.stack.blocks.cross_attention
    return eqx.tree_at(
        lambda m: m.decoder.stack.blocks.cross_attention, model, Ignores(layer.heads)
    )


BUGS = {
    "a causal encoder": ("bidirectional", lambda: with_direction("encoder", True)),
    "a decoder that sees all": ("causal", lambda: with_direction("decoder", False)),
    "a cache without lengths": (
        "cached",
        lambda: drawn(lambda key: Forgets(VOCAB, VOCAB, key=key)),
    ),
    "cross-attention without lengths": ("batch", ignoring),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug):
    check, make = BUGS[bug]
    subject = make_subject(make(), "encoder-decoder", None, True, 7, 0)
    assert LAWS[check](subject) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "relative", "block": "sandwich"},
        {"positions": "alibi", "block": "parallel", "attention": "full"},
    ],
    ids=lambda changes: changes["positions"],
)
def test_an_encoder_passes_the_checks(changes):
    config = dataclasses.replace(OURS, **changes)
    checks = ["shapes", "bidirectional", "batch", "padding", "gradients"]
    model = drawn(lambda key: Encoder(config, VOCAB, key=key))
    assert list(check_block(model, checks=checks).checks) == checks


def test_a_shared_table_is_stored_and_counted_once():
    shared, apart = paper(ONE), paper(ONE, shared=False)
    table = VOCAB * PAPER.d_model
    assert count_parameters(apart) - count_parameters(shared) == table
    source, _, targets = pairs()

    @eqx.filter_jit
    @eqx.filter_grad
    def grad(model):
        return jnp.sum(model(jnp.asarray(source), jnp.asarray(targets)) ** 2)

    grads = grad(shared)
    only_in_source = sorted(set(source.ravel()) - set(targets.ravel()))
    untied = dataclasses.replace(ONE, tied_head=False)
    by_source = grad(paper(untied)).decoder.embedding.weight
    assert grads.encoder.embedding is None
    assert (np.abs(by_source[jnp.array(only_in_source)]).max(-1) > 0).all()


def test_the_table_of_an_encoder_decoder_adds_up():
    model = paper()
    text = summary(model, batch_size=2)
    rows = [line.split() for line in text.split("---\n")[1].splitlines()[:-1]]
    assert sum(int(row[-2].replace(",", "")) for row in rows) == count_parameters(model)
    assert "decoder.stack.blocks.cross_attention.heads.query (x 2)" in text
    assert all("[seq, " in line for line in text.split("---\n")[1].splitlines()[:-1])
    # By hand: a decoder's layer has a product more for each matrix of its cross-attention.
    d, context, layers = PAPER.d_model, PAPER.context_length, PAPER.n_layers
    products = layers * (12 + 16) * d * d + VOCAB * d
    attention = layers * 3 * 2 * context * d
    forward, training = flops_per_token(model)
    assert forward == 2 * (products + attention)
    assert training == 3 * forward


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_may_be_numpys(dtype):
    source, lengths, targets = (x.astype(dtype) for x in pairs())
    inputs = shift_right(targets, 0)
    np.testing.assert_array_equal(inputs, shift_right(jnp.asarray(targets), 0))
    model = paper()
    wanted = model(jnp.asarray(source), inputs, source_lengths=jnp.asarray(lengths))
    np.testing.assert_array_equal(model(source, np.asarray(inputs), source_lengths=lengths), wanted)
    found = model.encode(source, lengths)
    np.testing.assert_array_equal(found, model.encode(jnp.asarray(source), jnp.asarray(lengths)))
    model.init_cache(source, lengths)
    ends = {"start": 0, "end": 1, "beam": 1, "max_new_tokens": 2}
    a = beam_search(model, source, source_lengths=lengths, **ends)
    b = beam_search(model, jnp.asarray(source), source_lengths=jnp.asarray(lengths), **ends)
    np.testing.assert_array_equal(a.ids, b.ids)


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_ids_that_are_none_have_no_maps_and_no_targets(wrong):
    source, _, targets = pairs()
    bad, sentence = (
        np.where(source == source[0, 0], wrong, source),
        f"to {VOCAB - 1}, .* got {wrong}",
    )
    with pytest.raises(UserError, match=sentence):
        attention_maps(paper(), bad, targets)
    with pytest.raises(UserError, match=sentence):
        attention_maps(paper(), source, np.where(targets == targets[0, 0], wrong, targets))
    with pytest.raises(UserError, match=sentence):
        attention_maps(Encoder(ONE, VOCAB, key=jax.random.key(0)), bad)
    with pytest.raises(UserError, match=sentence):
        beam_search(paper(), bad, start=0, end=1)


@pytest.mark.parametrize("padding", [-1, VOCAB])
def test_padding_may_be_anything(padding):
    source, lengths, targets = pairs()
    inputs, model = shift_right(targets, 0), paper()
    padded = np.where(np.arange(7) < lengths[:, None], source, padding)
    wanted = model(source, inputs, source_lengths=lengths)
    np.testing.assert_array_equal(model(padded, inputs, source_lengths=lengths), wanted)
    ends = {"start": 0, "end": 1, "beam": 1, "max_new_tokens": 2}
    wanted = beam_search(model, source, source_lengths=lengths, **ends).ids
    found = beam_search(model, padded, source_lengths=lengths, **ends).ids
    np.testing.assert_array_equal(found, wanted)
    attention_maps(model, padded, inputs, source_lengths=lengths)
    attention_maps(Encoder(ONE, VOCAB, key=jax.random.key(0)), padded, lengths=lengths)
    with pytest.raises(UserError, match=f"got {padding}"):
        beam_search(model, padded, source_lengths=lengths + (lengths < 7), **ends)


def test_the_attention_maps_of_all_three_kinds():
    source, lengths, targets = pairs()
    mask = np.arange(7) < lengths[:, None]
    maps = attention_maps(
        paper(), jnp.asarray(source), jnp.asarray(targets), source_lengths=jnp.asarray(lengths)
    )
    assert set(maps) == {
        f"{half}.stack.blocks.{layer}.{kind}"
        for half, kinds in (
            ("encoder", ["attention"]),
            ("decoder", ["attention", "cross_attention"]),
        )
        for kind in kinds
        for layer in range(2)
    }
    for name, weights in maps.items():
        queries, keys = 7 if "encoder" in name else 6, 6 if "decoder" in name else 7
        keys = 7 if "cross" in name else keys
        assert weights.shape == (3, 2, queries, keys)
        np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)
        if name.startswith("decoder") and "cross" not in name:
            assert not np.triu(weights, 1).any()
        else:  # the sources' padding
            seen = np.broadcast_to(mask[:, None, None], weights.shape)
            assert not weights[~seen].any()
            assert (weights[seen] > 0).all()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda key: Seq2Seq(dataclasses.replace(PAPER, block="parallel"), 5, 5, key=key),
            "must be one of pre, post, sandwich, got parallel",
        ),
        (
            lambda key: Encoder(dataclasses.replace(PAPER, attention="sliding"), 5, key=key),
            "attention must be full, got sliding",
        ),
        (
            lambda key: Seq2Seq(PAPER, 5, 6, share_embedding=True, key=key),
            "both vocabularies must be the same, got 5 and 6",
        ),
    ],
)
def test_what_does_not_fit_is_said(make, sentence):
    with pytest.raises((UserError, ValueError), match=sentence):
        eqx.filter_eval_shape(make, jax.random.key(0))


def test_a_decoder_block_without_a_source_says_so():
    block = unstacked(paper(ONE).decoder).stack.blocks[0]
    with pytest.raises(ValueError, match="needs a cache or context"):
        block(jnp.zeros((1, 3, 16)))


class OwnAttention(Attention):
    def __init__(self, config, *, causal=True, key):
        super().__init__(heads_of(config, key), causal=causal)


class Untold(OwnAttention):
    def __init__(self, config, *, key):
        super().__init__(config, key=key)


def test_a_custom_attention_receives_causal():
    config = dataclasses.replace(ONE, attention=OwnAttention)
    model = drawn(lambda key: Seq2Seq(config, VOCAB, VOCAB, key=key))
    assert not model.encoder.stack.blocks.attention.causal
    assert model.decoder.stack.blocks.attention.causal
    config = dataclasses.replace(ONE, attention=Untold)
    for kind, sizes in ((Encoder, (5,)), (Seq2Seq, (5, 5))):
        with pytest.raises(UserError, match="Untold is not for an encoder"):
            eqx.filter_eval_shape(kind, config, *sizes, key=jax.random.key(0))


def test_attention_maps_need_a_method_weights_of_the_right_shape():
    class Wrong(OwnAttention):
        def weights(self, x, *others, **options):
            return super().weights(x, *others, **options)[0]

    class Holder(eqx.Module):
        inner: Any
        weights: jax.Array  # no method

        def __call__(self, x):
            return self.inner(x)[0]

    x = jnp.ones((2, 3, 16))
    kinds: list[Any] = [OwnAttention, Wrong]
    for kind in kinds:
        holder = Holder(kind(ONE, key=jax.random.key(0)), jnp.ones(3))
        if kind is OwnAttention:
            assert set(attention_maps(holder, x)) == {"inner"}
        else:
            with pytest.raises(UserError, match=r"inner.weights must return \[\*batch, heads"):
                attention_maps(holder, x)
