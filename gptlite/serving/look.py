"""A look inside a model while it predicts a token."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gptlite.config import ModelConfig
from gptlite.inspect.attention_maps import attention_maps
from gptlite.inspect.logit_lens import residual_stream
from gptlite.models.gpt import GPT

# Cells of a side of a small map of attention.
SIDE = 64
# Tokens that are reported of what a layer would predict.
N_BEST = 10
MIN_ROOM = 16
# Attention weights that are computed at once, of all layers and heads: 512 MiB.
MAX_WEIGHTS = 2**27


class Layer(NamedTuple):
    """An attention with weights."""

    name: str
    row: Float[np.ndarray, "heads keys"]
    """The weights of the place that is looked at."""
    maps: Float[np.ndarray, "heads side side"]
    """All weights; in a text of more than 64 tokens, a cell is the largest of several."""


class Guess(NamedTuple):
    """The prediction of a layer if it were the last, in nats."""

    ids: Int[np.ndarray, " best"]
    log_probs: Float[np.ndarray, " best"]
    next_log_prob: float | None
    """That of the token that follows in the text. None if there is none."""


class Inside(NamedTuple):
    """The findings of `look_inside`."""

    layers: list[Layer]
    guesses: list[Guess]
    """From the input of the first layer, and from the output of every layer."""


def longest(config: ModelConfig) -> int:
    """The most tokens that `look_inside` takes: of a large model, fewer than its context has."""
    heads = config.n_layers * config.n_heads
    return max(1, min(config.context_length, math.isqrt(MAX_WEIGHTS // heads)))


def look_inside(model: GPT, ids: Sequence[int], place: int) -> Inside:
    """How the model predicts what follows `ids[place]`: the attention weights of every layer, and
    the logit lens.

    Programs are compiled for few lengths of texts: the ids are padded, which changes nothing before
    the padding, because attention is causal.
    """
    count = len(ids)
    room = MIN_ROOM
    while room < count:
        room *= 2
    room = min(room, longest(model.config))
    scale = -(-room // SIDE)
    padded = np.zeros(room, np.int32)
    padded[:count] = ids
    following = ids[place + 1] if place + 1 < count else -1
    numbers = jnp.array([count, place, following], jnp.int32)
    arrays = _look_inside(model, jnp.asarray(padded), numbers, scale)
    weights, best, best_ids, nexts = jax.tree.map(
        lambda x: np.asarray(x) if eqx.is_array(x) else x, arrays
    )
    side = -(-count // scale)
    layers = [Layer(name, row[:, :count], maps[:, :side, :side]) for name, row, maps in weights]
    guesses = [
        Guess(best_ids[i], best[i], None if following < 0 else float(nexts[i]))
        for i in range(len(nexts))
    ]
    return Inside(layers, guesses)


@eqx.filter_jit
def _look_inside(
    model: GPT, ids: Int[Array, " room"], numbers: Int[Array, "3"], scale: int
) -> tuple[list[tuple[str, Array, Array]], Array, Array, Array]:
    count, place, following = numbers
    is_text = jnp.arange(len(ids))[:, None] < count
    weights = [
        (name, jnp.take(w, place, axis=-2), _shrunk(jnp.where(is_text, w, 0), scale))
        for name, w in attention_maps(model, ids).items()
    ]
    stream = jnp.take(residual_stream(model, ids), place, axis=-2)
    log_probs = jax.nn.log_softmax(model.logits(model.norm(stream)), axis=-1)
    best, best_ids = jax.lax.top_k(log_probs, min(N_BEST, model.vocab_size))
    return weights, best, best_ids, jnp.take(log_probs, jnp.maximum(following, 0), axis=-1)


def _shrunk(
    weights: Float[Array, "heads queries keys"], scale: int
) -> Float[Array, "heads side side"]:
    heads, queries, keys = weights.shape
    padding = ((0, 0), (0, -queries % scale), (0, -keys % scale))
    cells = jnp.pad(weights, padding).reshape(
        heads, -1, scale, (keys + padding[2][1]) // scale, scale
    )
    return jnp.max(cells, axis=(2, 4))
