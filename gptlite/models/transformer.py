"""What all models have in common: from ids to hidden states."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from gptlite.config import ModelConfig
from gptlite.models.parts import make_norm
from gptlite.nn.embedding import Embedding
from gptlite.nn.positions import Learned, NoPositions, Offset, Sinusoidal
from gptlite.nn.stack import Layers, Stack
from gptlite.sharding import constrain, gathered


class Transformer(eqx.Module):
    """Embedding, a stack of blocks, a final norm."""

    embedding: Embedding
    previous: tuple[Embedding, ...]
    positions: Callable
    dropout: eqx.nn.Dropout
    stack: Stack | Layers
    norm: Callable
    config: ModelConfig = eqx.field(static=True)

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        make_block: Callable[[ModelConfig, PRNGKeyArray], Any],
        *,
        final_norm: bool = True,
        key: PRNGKeyArray,
    ):
        """`rows`: of the embedding. `make_block(config, key)` makes a layer. Without `final_norm`,
        what comes out of the last layer is all."""
        embedding_key, positions_key, stack_key, _ = jax.random.split(key, 4)
        d_model = config.d_model
        self.config = config
        scale = math.sqrt(d_model) if config.scale_embedding else 1.0
        # A head that shares the embedding's matrix wants it small: logits start near 0.
        std = 0.02 if config.init == "gpt2" or config.tied_head else 1.0
        if config.scale_embedding:
            std = 1.0 / scale
        self.embedding = Embedding(rows, d_model, std=std, scale=scale, key=embedding_key)
        self.previous = tuple(
            Embedding(rows, d_model, std=0.0, scale=scale, key=embedding_key)
            for _ in range(config.embed_previous)
        )
        if config.positions == "learned":
            self.positions = Learned(config.context_length, d_model, std=std, key=positions_key)
        else:
            self.positions = Sinusoidal() if config.positions == "sinusoidal" else NoPositions()
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.stack = Stack(
            lambda key: make_block(config, key),
            config.n_layers,
            scan=config.stack == "scan",
            key=stack_key,
        )
        norm_key = jax.random.fold_in(stack_key, config.n_layers)
        self.norm = make_norm(config, norm_key) if final_norm else eqx.nn.Identity()

    def _run(
        self,
        ids: Int[Array, "*batch seq"],
        before: Int[Array, "*batch back"],
        caches: PyTree,
        offset: Offset,
        padding_mask: Bool[Array, "*batch places"] | None,
        key: PRNGKeyArray | None,
        **shared: Any,
    ) -> tuple[Float[Array, "*batch seq d_model"], PyTree]:
        """Hidden states of ids at positions from `offset` on, which follow `before`, and caches
        with them added. Every block is given `shared`."""
        embedding_key, stack_key = (None, None) if key is None else jax.random.split(key)
        back, seq = before.shape[-1], ids.shape[-1]
        first = offset
        if padding_mask is not None:
            shared["padding_mask"] = padding_mask
            # A sequence begins at its first token.
            first = offset - jnp.argmax(padding_mask, axis=-1)
        x = gathered(self.embedding, "embedding")(ids)
        with_before = jnp.concatenate([before, ids], axis=-1)
        for lag, embedding in enumerate(self.previous, start=1):
            x = x + gathered(embedding, "embedding")(
                with_before[..., back - lag : back - lag + seq]
            )
        x = constrain(self.positions(x, first), "batch", None, None)
        x = self.dropout(x, key=embedding_key, inference=key is None)
        if self.config.value_residual:
            shared["first_values"] = self.stack.first.first_values(x)
        x, caches = self.stack(x, caches, offset, key=stack_key, **shared)
        return self.norm(x), caches

    def _read(
        self,
        ids: Int[Array, "*batch seq"],
        padding_mask: Bool[Array, "*batch seq"] | None,
        key: PRNGKeyArray | None,
        **shared: Any,
    ) -> Float[Array, "*batch seq d_model"]:
        """Hidden states of whole sequences."""
        if padding_mask is not None:
            ids = jnp.where(padding_mask, ids, -1)
        nothing = jnp.full((*ids.shape[:-1], len(self.previous)), -1, ids.dtype)
        return self._run(ids, nothing, None, 0, padding_mask, key, **shared)[0]
