import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, VOCAB, tiny_model

from gptlite.errors import UserError
from gptlite.machine.mesh import make_mesh
from gptlite.text import batches as batches_module
from gptlite.text.tokens import Split
from gptlite.training.evaluate import Evaluation


@pytest.mark.parametrize("tokens", [2, 13, 14, 100])
def test_it_is_the_mean_over_every_token(tokens, monkeypatch):
    """Against one window at a time: several batches, a short last window, padding rows."""
    monkeypatch.setattr(batches_module, "TOKENS_PER_BATCH", 3 * TINY.context_length)
    model = tiny_model(dropout=0.3)
    ids = np.random.default_rng(0).integers(0, VOCAB, tokens).astype(np.int32)
    forward = jax.jit(lambda x: model(x))
    losses = []
    for start in range(0, tokens - 1, TINY.context_length):
        window = ids[start : start + TINY.context_length + 1]
        logits = forward(
            jnp.asarray(np.pad(window[:-1], (0, TINY.context_length + 1 - len(window))))
        )
        log_probs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        losses += (-log_probs[np.arange(len(window) - 1), window[1:]]).tolist()
    assert len(losses) == tokens - 1
    value = Evaluation(ids, TINY.context_length, make_mesh())(model)
    # A mean of up to 99 float32 losses, summed in another order.
    np.testing.assert_allclose(value, np.mean(losses), rtol=1e-5)


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_a_text_of_another_tokenizer_is_refused(wrong):
    evaluation = Evaluation(np.array([0, wrong, 1], np.int32), TINY.context_length, make_mesh())
    with pytest.raises(UserError, match=f"from 0 to {VOCAB - 1}, .* got {wrong}"):
        evaluation(tiny_model())


def test_bits_per_byte_of_a_uniform_guess():
    """Guessing evenly among 256 bytes costs 8 bits per byte, whatever the tokens are."""
    ids = np.zeros(11, np.int32)
    assert Split(ids, ids, 10, "", 0).bits_per_byte(math.log(256)) == pytest.approx(8)
    assert Split(ids, ids, 40, "", 0).bits_per_byte(math.log(256)) == pytest.approx(2)
