"""Next-token cross-entropy."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gptlite.models.gpt import GPT
from gptlite.nn.kernels.head import head_losses


def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Int[Array | np.ndarray, "*batch"],
    label_smoothing: float = 0.0,
) -> Float[Array, "*batch"]:
    """`-log softmax(logits)[target]`, in nats; NaN for a target that is not in the vocabulary.

    With label smoothing the target distribution is `1 - label_smoothing` on the target plus
    `label_smoothing` spread evenly over the vocabulary (Szegedy et al., 2016, section 7).
    """
    known = (targets >= 0) & (targets < logits.shape[-1])
    at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    expected = jnp.where(known, at_target, jnp.nan)
    if label_smoothing:
        mean = jnp.mean(logits, axis=-1)
        expected = (1 - label_smoothing) * expected + label_smoothing * mean
    return jax.nn.logsumexp(logits, axis=-1) - expected


def window_losses(
    model: GPT,
    windows: Int[Array | np.ndarray, "batch seq_and_next"],
    *,
    label_smoothing: float = 0.0,
    key: Array | None = None,
) -> tuple[Float[Array, "batch seq"], Float[Array, ""]]:
    """The loss at every position of windows of ids, whose targets are the next ids, and the
    auxiliary loss. `key` switches dropout on.

    The cross-entropy of `model.logits`, but the logits may be rounded to the format of the model.
    """
    hidden, aux_loss = model.hidden(windows[:, :-1], key=key)
    losses = head_losses(
        hidden,
        model.head_weight(),
        jnp.asarray(windows)[:, 1:],
        vocab_size=model.vocab_size,
        cap=model.config.logit_cap,
        label_smoothing=label_smoothing,
        recompute=model.config.remat == "block",
    )
    return losses, aux_loss
