"""The head's cross-entropy, without its logits in memory more often than needed.

The reference, with `n` real rows of `weight`:

    cross_entropy(capped(project(hidden, weight)[..., :n], cap), targets, label_smoothing)
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gptlite.nn.dtypes import widen
from gptlite.nn.linear import capped, project
from gptlite.sharding import constrain, n_shards

# Logits that a device computes at once: 512 MiB in float32.
MAX_LOGITS = 2**27
# Bytes of the logits' gradient that a device keeps for the backward pass.
MAX_KEPT = 2**32


def terms(
    logits: Float[Array, "*batch rows"],
    targets: Int[Array, "*batch"],
    label_smoothing: float,
    vocab_size: int,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """The cross-entropy as a difference, `training.loss.cross_entropy` before its subtraction: the
    logarithm of the sum of exponentials, and the expected logit. Rows from `vocab_size` on are
    padding."""
    at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    known = (targets >= 0) & (targets < vocab_size)
    at_target = jnp.where(known, at_target, jnp.nan)
    # Not a slice, which XLA would copy.
    rows = logits.shape[-1]
    real = jnp.arange(rows) < vocab_size if rows > vocab_size else None
    if label_smoothing:
        mean = jnp.sum(logits, axis=-1, where=real) / vocab_size
        at_target = (1 - label_smoothing) * at_target + label_smoothing * mean
    return jax.nn.logsumexp(logits, axis=-1, where=real), at_target


def head_losses(
    hidden: Float[Array, "batch seq d_model"],
    weight: Float[Array, "rows d_model"],
    targets: Int[Array, "batch seq"],
    *,
    vocab_size: int,
    cap: float | None = None,
    label_smoothing: float = 0.0,
    recompute: bool = False,
) -> Float[Array, "batch seq"]:
    """The cross-entropy of the logits, which may be rounded to the format of `hidden`, in nats.

    Where a device's logits would be more than `MAX_LOGITS` numbers, the work is done for some
    positions of all rows at a time. For a gradient, that of the logits is computed in the forward
    pass and kept; with `recompute`, or where it would be more than `MAX_KEPT` bytes, the logits are
    computed once more.
    """
    batch, seq = targets.shape
    shards = n_shards("batch", batch) * n_shards("vocab", len(weight))
    per_position = -(-batch * len(weight) // shards)
    parts = -(-seq // max(1, MAX_LOGITS // per_position))
    parts = 2 ** (parts - 1).bit_length()  # which divides most context lengths
    head = _Head(
        vocab_size=vocab_size,
        cap=cap,
        label_smoothing=label_smoothing,
        parts=parts,
        keeps=not recompute and seq * per_position * hidden.dtype.itemsize <= MAX_KEPT,
    )
    padding = -seq % parts
    hidden = jnp.pad(hidden, [(0, 0), (0, padding), (0, 0)])
    targets = jnp.pad(targets, [(0, 0), (0, padding)])
    return _head_losses(hidden, weight, targets, head)[:, :seq]


@dataclass(frozen=True)
class _Head:
    """From hidden states to losses, and back."""

    vocab_size: int
    """Rows of the weight from there on are padding."""
    cap: float | None
    label_smoothing: float
    parts: int
    """In how many equal parts of the sequence the work is done."""
    keeps: bool
    """Whether the gradient of the logits is kept for the backward pass."""

    def logits(self, hidden: Array, weight: Array) -> Array:
        return constrain(project(hidden, weight, hidden.dtype), "batch", None, "vocab")

    def capped(self, logits: Array) -> Array:
        return capped(widen(logits), self.cap)

    def terms(self, logits: Array, targets: Array) -> tuple[Array, Array]:
        return terms(self.capped(logits), targets, self.label_smoothing, self.vocab_size)

    def losses(self, hidden: Array, weight: Array, targets: Array) -> Array:
        total, at_target = self.terms(self.logits(hidden, weight), targets)
        return total - at_target

    def logit_gradient(self, logits: Array, targets: Array, total: Array) -> Array:
        """The gradient of the sum of the losses. `total`: of `terms`."""
        wide, through_cap = jax.vjp(self.capped, logits)
        token = jnp.arange(logits.shape[-1])
        expected = jnp.where(token == targets[..., None], 1 - self.label_smoothing, 0)
        expected += self.label_smoothing / self.vocab_size
        grad = jnp.exp(wide - total[..., None]) - expected
        if len(token) > self.vocab_size:
            grad = jnp.where(token < self.vocab_size, grad, 0)
        return through_cap(grad)[0]

    def gradients(
        self, hidden: Array, weight: Array, logit_gradient: Array, loss_gradient: Array
    ) -> tuple[Array, Array]:
        """The gradients of `hidden` and `weight`. A row of `logit_gradient` counts as often as its
        `loss_gradient` says. That factor multiplies rows of `hidden`, before the product that makes
        the weight's gradient and after the one that makes its own: they are shorter."""
        by_row = loss_gradient[..., None]
        scaled = (widen(hidden) * by_row).astype(hidden.dtype)
        grad_hidden, grad_weight = jax.vjp(self.logits, scaled, weight)[1](logit_gradient)
        return (widen(grad_hidden) * by_row).astype(hidden.dtype), grad_weight

    def split(self, x: Array) -> Array:
        """`[batch, seq, ...]` as `[parts, batch, seq / parts, ...]`."""
        batch, seq, *rest = x.shape
        return jnp.swapaxes(x.reshape(batch, self.parts, seq // self.parts, *rest), 0, 1)

    def join(self, parts: Array) -> Array:
        x = jnp.swapaxes(parts, 0, 1)
        return x.reshape(len(x), -1, *x.shape[3:])


def _losses(hidden: Array, weight: Array, targets: Array, head: _Head) -> Array:
    if head.parts == 1:
        return head.losses(hidden, weight, targets)
    parts = head.split(hidden), head.split(targets)
    return head.join(lax.map(lambda part: head.losses(part[0], weight, part[1]), parts))


def _forward(hidden, weight, targets, head):
    if not head.keeps:
        return _losses(hidden, weight, targets, head), (hidden, weight, targets)
    logits = head.logits(hidden, weight)
    total, at_target = head.terms(logits, targets)
    if head.parts == 1:
        grad = head.logit_gradient(logits, targets, total)
        return total - at_target, (hidden, weight, grad)
    size = targets.shape[1] // head.parts

    def replace(i, buffer):
        part = (lax.dynamic_slice_in_dim(x, i * size, size, 1) for x in (buffer, targets, total))
        return lax.dynamic_update_slice_in_dim(buffer, head.logit_gradient(*part), i * size, 1)

    # Logits and gradient share a buffer.
    grad = lax.fori_loop(0, head.parts, replace, logits)
    return total - at_target, (hidden, weight, grad)


def _backward(head, residuals, grad_losses):
    hidden, weight, rest = residuals
    if head.keeps:
        return *head.gradients(hidden, weight, rest, grad_losses), None

    def add_part(grad_weight, part):
        hidden, targets, grad_losses = part
        logits = head.logits(hidden, weight)
        grad = head.logit_gradient(logits, targets, head.terms(logits, targets)[0])
        grad_hidden, grad_rest = head.gradients(hidden, weight, grad, grad_losses)
        return grad_weight + grad_rest, grad_hidden

    zero = jnp.zeros(weight.shape, widen(weight).dtype)
    parts = head.split(hidden), head.split(rest), head.split(grad_losses)
    grad_weight, grad_hidden = lax.scan(add_part, zero, parts)
    return head.join(grad_hidden), grad_weight.astype(weight.dtype), None


_head_losses = jax.custom_vjp(_losses, nondiff_argnums=(3,))


_head_losses.defvjp(_forward, _backward)
