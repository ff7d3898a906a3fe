"""GPT-2's block against Hugging Face's GPT2LMHeadModel, same weights."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import needs

from gptlite.models.gpt import GPT
from gptlite.presets import GPT2_SMALL

CONFIG = dataclasses.replace(GPT2_SMALL, n_layers=3, n_heads=4, d_model=32, context_length=24)
VOCAB = 61


@pytest.fixture(scope="module")
def theirs():
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=24,
            n_embd=32,
            n_layer=3,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    with torch.no_grad():  # away from ones and zeros, so that no gain or bias can go unnoticed
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def ours(theirs) -> GPT:
    state = {name: value.detach().numpy() for name, value in theirs.state_dict().items()}

    def layers(name):
        return np.stack([state[f"transformer.h.{i}.{name}"] for i in range(3)])

    # Theirs are [d_in, d_out], and query, key and value side by side.
    qkv = np.split(layers("attn.c_attn.weight").swapaxes(1, 2), 3, axis=1)
    qkv_bias = np.split(layers("attn.c_attn.bias"), 3, axis=1)
    weights = {
        "embedding.weight": state["transformer.wte.weight"],
        "positions.weight": state["transformer.wpe.weight"],
        "norm.weight": state["transformer.ln_f.weight"],
        "norm.bias": state["transformer.ln_f.bias"],
    }
    for i, part in enumerate(("query", "key", "value")):
        weights[f"stack.blocks.attention.heads.{part}.weight"] = qkv[i]
        weights[f"stack.blocks.attention.heads.{part}.bias"] = qkv_bias[i]
    for mine, their in {
        "attention.heads.output": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }.items():
        weights[f"stack.blocks.{mine}.weight"] = layers(f"{their}.weight").swapaxes(1, 2)
        weights[f"stack.blocks.{mine}.bias"] = layers(f"{their}.bias")
    for mine, their in {"attention_residual.norm": "ln_1", "mlp_residual.norm": "ln_2"}.items():
        weights[f"stack.blocks.{mine}.weight"] = layers(f"{their}.weight")
        weights[f"stack.blocks.{mine}.bias"] = layers(f"{their}.bias")

    abstract = eqx.filter_eval_shape(GPT, CONFIG, VOCAB, key=jax.random.key(0))

    def fill(path, leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        weight = weights.pop(jax.tree_util.keystr(path, simple=True, separator="."))
        assert weight.shape == leaf.shape
        return jnp.asarray(weight)

    model = jax.tree_util.tree_map_with_path(fill, abstract)
    assert not weights
    return model


@needs("torch", "transformers")
def test_logits_and_loss_gradients_equal_hugging_faces(ours, theirs):
    ids = np.random.default_rng(0).integers(0, VOCAB, (3, 24))
    import torch

    expected = theirs(torch.tensor(ids), labels=torch.tensor(ids))
    logits = eqx.filter_jit(lambda model, ids: model(ids))(ours, jnp.asarray(ids))
    # float32 on both sides, sums in different orders.
    np.testing.assert_allclose(logits, expected.logits.detach().numpy(), atol=1e-4)

    from gptlite.training.loss import window_losses

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model):
        return jnp.mean(window_losses(model, jnp.asarray(ids))[0])

    value, grads = loss(ours)
    np.testing.assert_allclose(value, expected.loss.item(), rtol=1e-5)
    expected.loss.backward()
    wte = theirs.transformer.wte.weight.grad.numpy()
    np.testing.assert_allclose(grads.embedding.weight, wte, atol=1e-5)
    up = theirs.transformer.h[1].mlp.c_fc.weight.grad.numpy()
    np.testing.assert_allclose(grads.stack.blocks.mlp.up.weight[1].T, up, atol=1e-5)


@needs("torch", "transformers")
def test_parameters_are_counted_as_hugging_face_counts_them(ours, theirs):
    from gptlite.machine.pytrees import count_parameters

    assert count_parameters(ours) == sum(p.numel() for p in theirs.parameters())
