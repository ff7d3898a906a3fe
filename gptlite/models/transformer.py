"""The trunk of all models: from ids to hidden states."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from gptlite.config import ModelConfig
from gptlite.errors import require
from gptlite.machine.ids import check_ids
from gptlite.models.build import embedding_std, make_part, make_positions
from gptlite.nn.block import drop, split_key
from gptlite.nn.context import WHOLE_SEQUENCE, Context
from gptlite.nn.embedding import Embedding
from gptlite.nn.positions import token_positions
from gptlite.nn.stack import Caches, Layers, Stack
from gptlite.nn.variants.hybrid import HybridStack
from gptlite.sharding import constrain, gathered

# Ids of tokens. NumPy's are copied to the device.
Ids = Int[Array | np.ndarray, "*batch seq"]


class Transformer(eqx.Module):
    """Embedding, a stack of blocks, a final norm."""

    embedding: Embedding
    previous: tuple[Embedding, ...]
    positions: Any
    stack: Stack | Layers
    norm: Any
    config: ModelConfig = eqx.field(static=True)
    vocab_size: int = eqx.field(static=True)

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        make_block: Callable[..., Any],
        *,
        final_norm: bool = True,
        key: PRNGKeyArray,
    ):
        """`rows`: the rows of the embedding. `make_block(config, key, layer=layer)` makes the
        layer of that number. Without `final_norm`, the last layer's output is returned as it is."""
        # `GPT` takes the fourth key for its head.
        embedding_key, positions_key, stack_key, _ = jax.random.split(key, 4)
        d_model = config.d_model
        self.config, self.vocab_size = config, rows
        scale = math.sqrt(d_model) if config.scale_embedding else 1.0
        std = embedding_std(config)
        self.embedding = Embedding(rows, d_model, std=std, scale=scale, key=embedding_key)
        self.previous = tuple(
            Embedding(rows, d_model, std=0.0, scale=scale, key=embedding_key)
            for _ in range(config.embed_previous)
        )
        self.positions = make_positions(config, positions_key, added=True)
        make_stack = Stack if config.attention_every is None else HybridStack.of(config)
        self.stack = make_stack(
            lambda key, layer, config=config: make_block(config, key, layer=layer),
            config.n_layers,
            # With unrolled layers, XLA may recompute all of them before the first is needed.
            scan=config.stack == "scan" or config.remat != "none",
            remat=config.remat,
            key=stack_key,
        )
        after = jnp.asarray(config.n_layers)
        make = make_part if final_norm else eqx.nn.Identity  # which ignores what it is given
        self.norm = make("norm", config, jax.random.fold_in(stack_key, after), layer=after)

    def hidden(
        self,
        ids: Ids,
        context: Context = WHOLE_SEQUENCE,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], Float[Array, ""]]:
        """The output of the final norm, and what a mixture of experts adds to the training loss.
        Every layer is given `context`. `key` switches dropout on.

        **Raises:** `UserError` if there are no ids or more than the context has, or one is not in
        the vocabulary. (In a compiled function, where ids are not known, one beyond the vocabulary
        is taken for the last of it, and one below 0 has no embedding.)
        """
        seq, longest = ids.shape[-1], self.config.context_length
        require(
            1 <= seq <= longest,
            f"The model's context has {longest} tokens, got a sequence of {seq}.",
        )
        check_ids(ids, self.vocab_size, context.lengths)
        hidden, _, aux_loss = self._run(jnp.asarray(ids), None, None, context, key)
        return hidden, aux_loss

    def _run(
        self,
        ids: Int[Array, "*batch seq"],
        before: Int[Array, "*batch back"] | None,
        caches: Caches,
        context: Context,
        key: PRNGKeyArray | None,
    ) -> tuple[Float[Array, "*batch seq d_model"], Caches, Float[Array, ""]]:
        """Hidden states of ids that follow `before`, caches with them added, and the auxiliary
        loss. Without `before`, the sequence begins with `ids`."""
        embedding_key, stack_key = split_key(key, 2)
        back, seq = len(self.previous), ids.shape[-1]
        if before is None:
            before = jnp.full((*ids.shape[:-1], back), -1, ids.dtype)
        with_before = jnp.concatenate([before, ids], axis=-1)
        x = gathered(self.embedding, "embedding")(ids)
        places, starts = token_positions(seq, context.start), context.document_starts
        for lag, embedding in enumerate(self.previous, start=1):
            earlier = with_before[..., back - lag : back - lag + seq]
            if starts is not None:
                earlier = jnp.where(places - lag >= starts, earlier, -1)
            x = x + gathered(embedding, "embedding")(earlier)
        if starts is None:
            x = self.positions(x, context.start)
        else:
            eqx.filter_eval_shape(self.positions, x)  # raises, if the sequence is too long
            # Each token as a sequence of its own, at its position in its document.
            x = self.positions(x[..., None, :], places - starts)[..., 0, :]
        x = constrain(x, "batch", None, None)
        x = drop(x, self.config.dropout, embedding_key)
        x, caches, aux_loss = self.stack(x, caches, context, key=stack_key)
        return self.norm(x), caches, aux_loss
