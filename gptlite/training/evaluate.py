"""The validation loss, over every token."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from gptlite.machine.ids import check_ids
from gptlite.machine.mesh import local_rows, place, place_batches
from gptlite.models.gpt import GPT
from gptlite.nn.stack import unstacked
from gptlite.text.batches import evaluation_batches
from gptlite.text.tokenizer import Ids
from gptlite.training.fit import DivergenceError, Progress
from gptlite.training.loss import window_losses


class Evaluation:
    """The mean cross-entropy, in nats per token, over every token of a text but its first.

    The text is read in consecutive windows of the context length. No sampling, no overlap.
    """

    def __init__(self, tokens: Ids, context_length: int, mesh: Mesh):
        """`mesh`: the devices that share the work.

        **Raises:** `UserError` if there are fewer than 2 tokens.
        """
        devices = mesh.shape["data"] * mesh.shape["fsdp"]
        batches, self._targets = evaluation_batches(tokens, context_length, devices)
        self._bounds = np.array([tokens.min(), tokens.max()])
        self._mesh = mesh
        self._batches: Any = place_batches(batches[:, local_rows(mesh, batches.shape[1])], mesh)

    def __call__(self, model: GPT) -> float:
        """Nats per token of the model; no dropout, no label smoothing.

        **Raises:** `UserError` if an id of the text is not in the model's vocabulary.
        """
        check_ids(self._bounds, model.vocab_size)
        with jax.set_mesh(self._mesh):
            summed = _summed_loss(place(model, self._mesh), self._batches)
        return float(summed) / self._targets

    def after(self, progress: Progress) -> float:
        """Nats per token of the model after a dispatch of steps.

        **Raises:** `DivergenceError` if the loss is not finite.
        """
        val_loss = self(progress.state.model)
        if not math.isfinite(val_loss):
            rate = progress.learning_rate
            report = {"step": progress.step, "val_loss": val_loss, "learning_rate": rate}
            raise DivergenceError(report, None)
        return val_loss


def summed_loss(model: GPT, batches: Int[Array, "batches rows seq_and_next"]) -> Float[Array, ""]:
    """The sum of the losses in `batches`, in nats, without those at padding."""
    model = unstacked(model)

    def batch_loss(windows):
        losses, _ = window_losses(model, jnp.maximum(windows, 0))
        return jnp.sum(jnp.where(windows[:, 1:] >= 0, losses, 0.0))

    return jnp.sum(lax.map(batch_loss, batches))


_summed_loss = eqx.filter_jit(summed_loss)
