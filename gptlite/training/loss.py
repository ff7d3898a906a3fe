"""Next-token cross-entropy."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gptlite.models.gpt import GPT
from gptlite.sharding import n_shards

# Logits that a device keeps at once: 512 MiB in float32.
MAX_LOGITS = 2**27


def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Int[Array, "*batch"],
    label_smoothing: float = 0.0,
) -> Float[Array, "*batch"]:
    """`-log softmax(logits)[target]`, in nats. NaN for a target outside the vocabulary, so that a
    padding of -1 that is not masked is noticed.

    With label smoothing the target distribution is `1 - label_smoothing` on the target plus
    `label_smoothing` spread evenly over the vocabulary (Szegedy et al., 2016, section 7).
    """
    at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    known = (targets >= 0) & (targets < logits.shape[-1])
    at_target = jnp.where(known, at_target, jnp.nan)
    if label_smoothing:
        mean = jnp.mean(logits, axis=-1)
        at_target = (1 - label_smoothing) * at_target + label_smoothing * mean
    return jax.nn.logsumexp(logits, axis=-1) - at_target


def window_losses(
    model: GPT,
    windows: Int[Array, "batch seq_and_next"],
    *,
    label_smoothing: float = 0.0,
    key: Array | None = None,
) -> tuple[Float[Array, "batch seq"], Float[Array, ""]]:
    """The loss at every position of windows of ids, whose targets are the next ids, and the
    auxiliary loss. `key` switches dropout on.

    Where a device's logits would be more than `MAX_LOGITS` numbers, they are computed for some
    positions of all windows at a time, and once more for the gradient.
    """
    hidden, aux_loss = model.hidden(windows[:, :-1], key=key)
    targets, weight = windows[:, 1:], model.head_weight()

    def losses(hidden, targets):
        return cross_entropy(model.logits(hidden, weight), targets, label_smoothing)

    batch, seq = targets.shape
    shards = n_shards("batch", batch) * n_shards("vocab", len(weight))
    most = max(1, MAX_LOGITS * shards // (batch * len(weight)))
    if seq <= most:
        return losses(hidden, targets), aux_loss
    count = -(-seq // most)
    positions = -(-seq // count)

    def parts(x):  # [count, batch, positions, ...], padded at the end
        x = jnp.pad(x, [(0, 0), (0, count * positions - seq), *[(0, 0)] * (x.ndim - 2)])
        return jnp.swapaxes(x.reshape(batch, count, positions, *x.shape[2:]), 0, 1)

    each = lax.map(lambda part: jax.checkpoint(losses)(*part), (parts(hidden), parts(targets)))
    return jnp.swapaxes(each, 0, 1).reshape(batch, -1)[:, :seq], aux_loss
