import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from conftest import tiny_model

from gptlite.config import TrainingConfig
from gptlite.errors import UserError
from gptlite.inspect.flops import flops_per_token
from gptlite.inspect.summary import activation_bytes, summary
from gptlite.machine.pytrees import count_parameters
from gptlite.models.gpt import GPT
from gptlite.nn.stack import unstacked
from gptlite.presets import PRESETS
from gptlite.runs.frozen import trainable


def abstract(preset: str) -> GPT:
    model = PRESETS[preset][1].model
    return eqx.filter_eval_shape(GPT, model, 65, key=jax.random.key(0))


def test_parameters_of_s_by_hand():
    d, layers, vocab, context = 128, 4, 65, 64
    block = 4 * d * d + 2 * d * 4 * d + 2 * d
    assert (
        count_parameters(abstract("s")) == vocab * d + context * d + layers * block + d == 804_096
    )


def test_parameters_of_a_model_are_its_arrays(variant):
    arrays = jax.tree.leaves(eqx.filter(variant, eqx.is_array))
    assert count_parameters(variant) == sum(array.size for array in arrays)


def test_flops_of_s_by_hand():
    d, layers, vocab, context = 128, 4, 65, 64
    products = layers * (4 * d * d + 2 * d * 4 * d) + vocab * d
    attention = layers * 2 * context * d
    forward, training = flops_per_token(abstract("s"))
    assert forward == 2 * (products + attention)
    # Every product has two more behind it, one for each operand's gradient. The gradient of learned
    # positions, a sum over sequences, is a product with ones.
    assert training == 3 * forward + 2 * d


class Narrow(eqx.Module):
    def __init__(self, config, *, key):
        pass

    def __call__(self, x):
        return x[..., 1:]


@pytest.mark.parametrize("remat", ["none", "block"])
def test_a_block_of_a_wrong_shape_is_named(remat):
    with pytest.raises(UserError, match="Narrow must return the shape of its input"):
        flops_per_token(tiny_model(mlp=Narrow, remat=remat))


def test_frozen_matrices_have_no_gradient_to_be_counted():
    model, d, layers = abstract("s"), 128, 4
    config = dataclasses.replace(PRESETS["s"][1], training=TrainingConfig(freeze="*.mlp.*"))
    trained = trainable(config, model)
    forward, training = flops_per_token(model)
    matrices = 2 * layers * 2 * d * 4 * d
    assert flops_per_token(model, trained) == (forward, training - matrices)
    assert f"of which {count_parameters(model) - matrices // 2:,} are trained" in summary(
        model, trained=trained
    )


def test_flops_do_not_depend_on_how_the_layers_run():
    assert flops_per_token(tiny_model()) == flops_per_token(tiny_model(stack="scan"))


def test_activations_grow_with_the_batch():
    """Also where tables, which the backward pass does not read, are larger than activations."""
    tables = tiny_model(context_length=8)
    tables = eqx.tree_at(
        lambda model: model.embedding.weight, tables, jax.ShapeDtypeStruct((10**6, 16), jnp.float32)
    )
    for model in (abstract("s"), tables):
        small, large = (activation_bytes(model, batch) for batch in (4, 8))
        assert 0 < 2 * small == large
        hidden = 4 * 4 * model.config.context_length  # numbers of 4 bytes in 4 rows
        assert small > hidden * (model.config.n_layers * model.config.d_model + model.vocab_size)


def test_activations_have_the_masks_of_dropout():
    plain, dropped = tiny_model(), tiny_model(dropout=0.1)
    assert activation_bytes(dropped, 2) > 1.1 * activation_bytes(plain, 2)


def test_layers_are_multiplied_only_where_they_are_stacked():
    model = tiny_model(n_layers=2)
    assert f"(x {model.config.n_layers})" in summary(model)
    assert "(x " not in summary(unstacked(model))


def test_the_table_names_every_part_and_adds_up(variant):
    text = summary(variant, batch_size=2)
    rows = [line.split() for line in text.split("---\n")[1].splitlines()[:-1]]
    assert sum(int(row[-2].replace(",", "")) for row in rows) == count_parameters(variant)
    assert abs(sum(float(row[-1].rstrip("%")) for row in rows) - 100) < 1
    assert f"{count_parameters(variant):,}" in text
    forward, training = flops_per_token(variant)
    assert f"{forward:,}" in text
    assert f"{training:,}" in text
    assert "with 2 rows at once" in text
    assert "- " not in "".join(
        line for line in text.splitlines() if "[seq" not in line and "x 2" in line
    )
