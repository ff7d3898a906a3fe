"""Log probabilities of tokens, as OpenAI's API returns them."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# How many of the most probable tokens are returned with each token (OpenAI's `top_logprobs`).
N_BEST = 20


class Scores(eqx.Module):
    """Log probabilities of tokens, in nats, and the `N_BEST` most probable tokens in their places,
    the best first."""

    log_prob: Float[Array, "batch tokens"]
    best_log_probs: Float[Array, "batch tokens best"]
    best_ids: Int[Array, "batch tokens best"]


def token_scores(
    logits: Float[Array, "batch tokens vocab"], ids: Int[Array, "batch tokens"]
) -> Scores:
    """The scores of tokens, for `prefill` and `decode` to observe."""
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    best, best_ids = lax.top_k(log_probs, min(N_BEST, log_probs.shape[-1]))
    log_prob = jnp.take_along_axis(log_probs, ids[..., None], axis=-1)[..., 0]
    return Scores(log_prob, best, best_ids.astype(jnp.int32))
