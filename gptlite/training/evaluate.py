"""The validation loss, over every token."""

import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from gptlite.models.gpt import GPT
from gptlite.text.batches import Split, split_windows
from gptlite.text.tokenizer import Ids
from gptlite.training.loss import window_losses

# Tokens in one batch of evaluation: enough to keep a device busy, little enough for any memory.
TOKENS_PER_BATCH = 8192


class Evaluation:
    """The mean cross-entropy, in nats a token, over every token of a text but its first.

    The text is read in consecutive windows of the context length. No sampling, no overlap.
    """

    def __init__(self, tokens: Ids, context_length: int):
        """**Raises:** `UserError` if there are fewer than 2 tokens."""
        windows, self.targets = split_windows(tokens, context_length)
        rows = min(len(windows), max(1, TOKENS_PER_BATCH // context_length))
        batches = -(-len(windows) // rows)
        padding = np.full((batches * rows - len(windows), context_length + 1), -1, np.int32)
        self._batches = jnp.asarray(
            np.concatenate([windows, padding]).reshape(batches, rows, context_length + 1)
        )

    def __call__(self, model: GPT) -> float:
        """Nats a token, without dropout or label smoothing."""
        return float(_summed_loss(model, self._batches)) / self.targets


def bits_per_byte(val_loss: float, split: Split) -> float:
    """A validation loss in nats a token as bits per byte of UTF-8, which compares across
    tokenizers."""
    return val_loss * (len(split.validation) - 1) / math.log(2) / split.validation_bytes


@eqx.filter_jit
def _summed_loss(model: GPT, batches: Int[Array, "batches rows seq_and_next"]) -> Float[Array, ""]:
    """Padding is -1, always at the end; a target of -1 counts nothing."""

    def batch_loss(windows):
        losses = window_losses(model, jnp.maximum(windows, 0))
        return jnp.sum(jnp.where(windows[:, 1:] >= 0, losses, 0.0))

    return jnp.sum(lax.map(batch_loss, batches))
