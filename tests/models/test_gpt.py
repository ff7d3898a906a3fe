import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, VARIANTS, VOCAB, tiny_model
from jaxtyping import TypeCheckError

from gptlite.config import ModelConfig
from gptlite.errors import UserError
from gptlite.family.encoder import Encoder
from gptlite.inspect.logit_lens import logit_lens
from gptlite.models.gpt import GPT
from gptlite.research.check_block import check_block
from gptlite.training.loss import cross_entropy, window_losses

IDS = jax.random.randint(jax.random.key(2), (3, TINY.context_length), 0, VOCAB)
make = eqx.filter_jit(GPT)
forward = eqx.filter_jit(lambda model, ids, key=None: model(ids, key=key))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_way_of_putting_a_model_together_is_right(name):
    fewest = 2 if "attention_every" in VARIANTS[name] else 1
    model = tiny_model(**VARIANTS[name] | {"n_layers": fewest})
    # Softmax cancels a bias of the keys, unless QK-norm or rotary positions turn it.
    gpt2 = model.config.bias and not model.config.qk_norm
    zero_grad = ["stack.blocks.attention.heads.key.bias"] if gpt2 else ()
    report = check_block(model, zero_grad=zero_grad, skip=["jit"])
    documents = set() if model.config.separate_documents else {"documents"}
    assert set(report.left_out) == {"jit", "sees", "transfer", "reference"} | documents
    silent = {"build", "bidirectional", "dropout", "auxiliary", "weights", "scan"}
    assert set(report.does_not_apply) == silent


def test_logits_stay_within_their_cap():
    model = tiny_model(logit_cap=0.5)
    free = np.asarray(forward(tiny_model(), IDS))
    assert np.abs(free).max() > 0.5
    np.testing.assert_allclose(forward(model, IDS), 0.5 * np.tanh(free / 0.5), rtol=1e-4, atol=1e-6)


def test_unrolled_and_scanned_agree_gradients_included():
    unrolled, scanned = tiny_model(n_layers=2), tiny_model(n_layers=2, stack="scan")

    @eqx.filter_jit
    @eqx.filter_grad
    def grad(model):
        return jnp.sum(jnp.sin(model(IDS)))

    np.testing.assert_allclose(forward(unrolled, IDS), forward(scanned, IDS), rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(grad(unrolled)), jax.tree.leaves(grad(scanned)), strict=True):
        # 1e-5 of the largest: float32 sums in another order.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(np.asarray(a)).max())


@pytest.mark.parametrize("which", ["dropout", "attention_dropout"])
def test_dropout_needs_a_key_and_is_a_function_of_it(which):
    model = tiny_model(**{which: 0.5})
    np.testing.assert_array_equal(forward(model, IDS), forward(tiny_model(), IDS))
    a, b = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(forward(model, IDS, a), forward(model, IDS, a))
    assert not np.allclose(forward(model, IDS, a), forward(model, IDS, b))


@pytest.mark.parametrize("how", [{"stack": "unrolled"}, {"stack": "scan"}, {"remat": "attention"}])
@pytest.mark.parametrize(
    ("knob", "output", "words"),
    [
        (
            "mlp",
            lambda x: x[..., :1],
            r"Own must .* shape .* returned \[3, 12, 1\] for \[3, 12, 16\]",
        ),
        ("attention", lambda x: x, r"Own must return \(y, cache\)\."),
        ("attention", lambda x: (x[:, :1], None), r"returned \[3, 1, 16\] for \[3, 12, 16\]"),
        ("block", lambda x: (x, None), r"Own must return \(y, cache, aux_loss\)\."),
        ("block", lambda x: (x[:, :1], None, 0.0), r"returned \[3, 1, 16\] for \[3, 12, 16\]"),
    ],
)
def test_outputs_that_would_broadcast_are_refused(how, knob, output, words):
    if "remat" in how and knob == "block":
        words = "remat attention needs a block with an `attention`: Own has none"

    class Own(eqx.Module):
        def __init__(self, config, *, key):
            pass

        def __call__(self, x, *args, **kwargs):
            return output(x)

    with pytest.raises(UserError, match=words):
        eqx.filter_eval_shape(tiny_model(**{knob: Own}, **how), IDS)


def test_padded_ids_are_never_predicted():
    model = make(TINY, VOCAB, padded_vocab_size=64, key=jax.random.key(0))
    assert model.embedding.weight.shape == (64, 16)
    assert model.head is not None
    assert model.head.weight.shape == (64, 16)
    assert forward(model, IDS).shape[-1] == VOCAB


def test_a_new_model_of_ours_predicts_all_characters_alike():
    np.testing.assert_array_equal(forward(make(TINY, VOCAB, key=jax.random.key(0)), IDS), 0.0)


def test_gpt2s_initialisation_is_gpt2s():
    config = dataclasses.replace(
        TINY, n_layers=8, d_model=128, init="gpt2", positions="learned", tied_head=True
    )
    model: Any = make(config, 500, key=jax.random.key(0))
    block = model.stack.blocks
    for weight, std in [
        (model.embedding.weight, 0.02),
        (model.positions.weight, 0.02),
        (block.attention.heads.query.weight, 0.02),
        (block.mlp.up.weight, 0.02),
        (block.attention.heads.output.weight, 0.005),
        (block.mlp.down.weight, 0.005),
    ]:
        np.testing.assert_allclose(np.std(weight), std, rtol=0.05)
    assert not np.array_equal(block.mlp.up.weight[0], block.mlp.up.weight[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_model": 15}, "multiple of model.n_heads, got d_model 15 and n_heads 2"),
        ({"d_model": 6}, "must be even, got 3"),
        ({"d_model": 5, "n_heads": 5, "positions": "sinusoidal"}, "must be even, got 5"),
        ({"n_layers": 0}, "n_layers must be at least 1 and at most 256, got 0"),
        ({"context_length": -1}, "context_length must be at least 1 .*got -1"),
        ({"dropout": 1.0}, "dropout must be at least 0.0 and at most 0.99, got 1.0"),
        ({"dropout": float("nan")}, "dropout must be at least"),
        (
            {"logit_cap": 1e-300},
            "logit_cap must be at least 1.2e-38, got 1e-300: in float32",
        ),
        ({"d_ff": 0}, "d_ff must be at least 1"),
        ({"positions": "rotray"}, "one of rotary, .*, none, got 'rotray'"),
        ({"norm": "rsm"}, "one of rms, layer, dyt, or FILE.py:CLASS .* got 'rsm'"),
        ({"n_heads": 4, "n_kv_heads": 3}, "multiple of model.n_kv_heads, got n_heads 4 and .* 3"),
        ({"n_heads": 2, "n_kv_heads": 4}, "multiple of model.n_kv_heads, got n_heads 2 and .* 4"),
        ({"n_kv_heads": 0}, "n_kv_heads must be at least 1, got 0"),
        ({"logit_cap": 0.0}, "logit_cap must be above 0.0, got 0.0"),
        ({"d_model": 16.0}, r"d_model must be int, got 16\.0"),
        ({"bias": 1}, "bias must be bool, got 1"),
        ({"attention": "kda:conv=2:conv=3"}, "'kda:conv=2:conv=3' has the option conv twice"),
        ({"attention": "kda:conv"}, "got 'kda:conv'. An option is written :NAME=VALUE"),
        ({"mlp": "my.py:Mine:rank"}, "got .* An option is written :NAME=VALUE"),
        ({"mlp": "moe:"}, "got 'moe:'. An option is written :NAME=VALUE"),
        ({"attention_every": "2:kda:conv"}, "An option is written :NAME=VALUE"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_a_sentence(changes, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(
    ("separate", "separator"), [(True, None), (True, VOCAB), (True, -1), (False, 1)]
)
def test_a_separator_that_does_not_fit_is_refused(separate, separator):
    config = dataclasses.replace(TINY, separate_documents=separate)
    with pytest.raises(UserError, match=f"separator from 0 to {VOCAB - 1}.* got {separator}"):
        GPT(config, VOCAB, separator=separator, key=jax.random.key(0))


def test_an_encoder_has_no_separate_documents():
    config = dataclasses.replace(TINY, separate_documents=True)
    with pytest.raises(UserError, match="leave separate_documents out"):
        Encoder(config, VOCAB, key=jax.random.key(0))


@pytest.mark.parametrize(("vocab", "padded"), [(0, None), (-1, None), (65, 64)])
def test_an_impossible_vocabulary_is_refused(vocab, padded):
    with pytest.raises(UserError, match="vocabulary must have at least 1"):
        GPT(TINY, vocab, padded_vocab_size=padded, key=jax.random.key(0))


@pytest.mark.parametrize("positions", ["learned", "rotary", "alibi", "none"])
@pytest.mark.parametrize("compiled", [True, False])
def test_ids_that_the_model_cannot_have_are_refused(positions, compiled):
    """A sequence beyond the context, always; an id beyond the vocabulary, where it is known."""
    model = tiny_model(positions=positions)
    call = forward if compiled else lambda model, ids: model(ids)
    long = jnp.zeros(TINY.context_length + 1, jnp.int32)
    with pytest.raises(UserError, match="context has 12 tokens, got a sequence of 13"):
        call(model, long)
    with pytest.raises(UserError, match="context has 12 tokens, got a sequence of 0"):
        call(model, long[:0])
    for ids in ([0, VOCAB], [-1, 0]):
        if not compiled:
            with pytest.raises(
                UserError,
                match=f"from 0 to {VOCAB - 1}, the model's vocabulary, got {max(ids, key=abs)}",
            ):
                call(model, jnp.array(ids))
    # Compiled, they are what the docstring says.
    if compiled:
        last = call(model, jnp.array([0, VOCAB - 1]))
        np.testing.assert_array_equal(call(model, jnp.array([0, VOCAB + 5])), last)


def test_padding_may_be_anything_and_a_batch_empty():
    model = tiny_model()
    assert model(IDS[:0]).shape == (0, TINY.context_length, VOCAB)
    lengths = np.array([4, 1, 12])
    real = np.arange(12) < lengths[:, None]
    wanted = model(IDS, lengths=lengths)[real]
    for padding in (-1, VOCAB):
        padded = np.where(real, IDS, padding)
        np.testing.assert_array_equal(model(padded, lengths=lengths)[real], wanted)
        with pytest.raises(UserError, match=f"got {padding}"):
            model(padded, lengths=np.array([4, 2, 12]))


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([4, 1], r"must have the shape \[\] or \[3\], one for each sequence, got \[2\]"),
        ([4, 1, 13], "must be from 0 to 12, the length of ids, got 13"),
        ([4, -1, 2], "must be from 0 to 12, the length of ids, got -1"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths, words):
    with pytest.raises(UserError, match=f"lengths {words}"):
        tiny_model()(IDS, lengths=np.array(lengths))


def test_ids_may_be_numpys():
    model = tiny_model()
    for dtype in (np.int32, np.int64):
        ids = np.asarray(IDS, dtype)
        np.testing.assert_array_equal(model(ids), model(IDS))
        logits = model(ids)
        np.testing.assert_array_equal(cross_entropy(logits, ids), cross_entropy(logits, IDS))
        (losses, _), lens = jax.eval_shape(
            lambda ids=ids: (window_losses(model, ids), logit_lens(model, ids))
        )
        assert (losses.shape, lens.shape[1:]) == ((3, TINY.context_length - 1), logits.shape)


def test_ids_that_are_no_ids_are_refused_by_name():
    with pytest.raises(TypeCheckError, match=r"GPT\.__call__") as error:
        tiny_model()(jnp.zeros((2, 3)))
    assert "Int" in str(error.value)
    assert "'ids'" in str(error.value)


def test_the_default_width_of_the_mlp():
    assert ModelConfig(d_model=128).d_hidden == 512
    assert ModelConfig(d_model=128, mlp="swiglu").d_hidden == 344
    assert ModelConfig(d_model=128, d_ff=100).d_hidden == 100


def test_relative_positions_need_distances_beyond_their_near_buckets():
    """Or the growth of the other buckets is a division by zero."""
    assert tiny_model(positions="relative:buckets=8:max_distance=5").config.positions
    with pytest.raises(UserError, match=r"max_distance above the 4 distances"):
        tiny_model(positions="relative:buckets=8:max_distance=4")
    # In an encoder, only half of the near buckets are for one direction.
    config = dataclasses.replace(TINY, positions="relative:buckets=8:max_distance=4")
    assert Encoder(config, VOCAB, key=jax.random.key(0)).config == config


def test_no_two_parameters_start_from_the_same_numbers():
    """Keys that are split carelessly give the same draws twice."""
    config = dataclasses.replace(
        TINY, n_layers=2, positions="relative:buckets=16", init="gpt2", embed_previous=0
    )
    model = make(config, VOCAB, key=jax.random.key(0))
    starts = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_inexact_array)):
        leaf = np.asarray(leaf).reshape(len(leaf) if leaf.ndim == 3 else 1, -1)
        for row in leaf[:, :16]:
            if np.std(row):  # gains start at one
                starts.setdefault(tuple(np.round(row / np.abs(row).max(), 4)), []).append(path)
    assert len(starts) > 8
    assert all(len(paths) == 1 for paths in starts.values())
