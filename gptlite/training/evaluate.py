"""The validation loss, over every token."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from gptlite.models.gpt import GPT
from gptlite.text.batches import split_windows
from gptlite.text.tokenizer import Ids
from gptlite.text.tokens import Split
from gptlite.training.loss import window_losses

# Tokens in one batch of evaluation: enough to keep a device busy, little enough for any memory.
TOKENS_PER_BATCH = 8192


class Evaluation:
    """The mean cross-entropy, in nats a token, over every token of a text but its first.

    The text is read in consecutive windows of the context length. No sampling, no overlap.
    """

    def __init__(self, tokens: Ids, context_length: int, mesh: Mesh):
        """`mesh`: the devices that share the work, along the axis `data`.

        **Raises:** `UserError` if there are fewer than 2 tokens.
        """
        shaped, self.targets = evaluation_batches(tokens, context_length, mesh.size)
        self._batches = jax.device_put(shaped, NamedSharding(mesh, PartitionSpec(None, "data")))
        self._mesh = mesh

    def __call__(self, model: GPT) -> float:
        """Nats a token, without dropout or label smoothing."""
        return float(_summed_loss(model, self._batches, self._mesh)) / self.targets


def evaluation_batches(
    tokens: Ids, context_length: int, devices: int
) -> tuple[Int[np.ndarray, "batches rows seq_and_next"], int]:
    """`tokens` in windows, in batches whose rows `devices` can share; and how many targets there
    are. Padding is -1.

    **Raises:** `UserError` if there are fewer than 2 tokens.
    """
    windows, targets = split_windows(tokens, context_length)
    rows = min(len(windows), max(1, TOKENS_PER_BATCH // context_length))
    rows = -(-rows // devices) * devices
    batches = -(-len(windows) // rows)
    padding = np.full((batches * rows - len(windows), context_length + 1), -1, np.int32)
    return np.concatenate([windows, padding]).reshape(batches, rows, context_length + 1), targets


def bits_per_byte(val_loss: float, split: Split) -> float:
    """A validation loss in nats a token as bits per byte of UTF-8, which compares across
    tokenizers."""
    return val_loss * (len(split.validation) - 1) / math.log(2) / split.validation_bytes


def summed_loss(model: GPT, batches: Int[Array, "batches rows seq_and_next"]) -> Float[Array, ""]:
    """Nats over all of `batches`. Padding is -1, at the end; a target of -1 counts nothing."""
    model = model.unstacked()

    def batch_loss(windows):
        losses = window_losses(model, jnp.maximum(windows, 0))
        return jnp.sum(jnp.where(windows[:, 1:] >= 0, losses, 0.0))

    return jnp.sum(lax.map(batch_loss, batches))


@eqx.filter_jit
def _summed_loss(
    model: GPT, batches: Int[Array, "batches rows seq_and_next"], mesh: Mesh
) -> Float[Array, ""]:
    arrays, static = eqx.partition(model, eqx.is_array)

    def on_device(arrays, batches):
        return lax.psum(summed_loss(eqx.combine(arrays, static), batches), "data")

    in_specs = (PartitionSpec(), PartitionSpec(None, "data"))
    return jax.shard_map(
        on_device, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec(), check_vma=False
    )(arrays, batches)
