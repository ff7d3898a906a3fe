"""The decoder-only language model."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.config import ModelConfig
from gptlite.errors import require
from gptlite.models.build import make_block
from gptlite.models.transformer import Ids, Transformer
from gptlite.nn.cache import Cache, read_at, write_at
from gptlite.nn.context import WHOLE_SEQUENCE, Context, PerSequence, document_starts
from gptlite.nn.linear import Linear, capped, project
from gptlite.sharding import constrain, gathered


class GPT(Transformer):
    """Embedding, a stack of blocks, a final norm and a head (Radford et al., 2019).

    From ids to the next token's logits at every position, for one sequence or for any batch.

    Loss, nats per token: tied head +0.015 ± 0.008; without embeddings of earlier tokens
    (`embed_previous`) +0.077 ± 0.021; with biases -0.002 ± 0.008; logits capped at 15 +0.003 ±
    0.005 (benchmarks/blocks.md).
    """

    head: Linear | None
    separator: int | None = eqx.field(static=True)

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        padded_vocab_size: int | None = None,
        separator: int | None = None,
        make_block: Callable[..., Any] = make_block,
        final_norm: bool = True,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `padded_vocab_size`: rows of the embedding and the head, where a round number is faster.
          Ids from `vocab_size` up are never predicted. Default: `vocab_size`.
        - `separator`: with `separate_documents`, the id that begins a document. The logits of a
          document are then the same as if it were alone.
        - `make_block`, `final_norm`: see `Transformer`.

        **Raises:** `UserError` if `vocab_size` is below 1 or above `padded_vocab_size`, or the
        separator does not fit the config.
        """
        rows = vocab_size if padded_vocab_size is None else padded_vocab_size
        require(
            1 <= vocab_size <= rows,
            f"The vocabulary must have at least 1 token and at most padded_vocab_size, got "
            f"vocab_size {vocab_size} and padded_vocab_size {rows}.",
        )
        known = separator is not None and 0 <= separator < vocab_size
        require(
            known if config.separate_documents else separator is None,
            f"With separate_documents, GPT needs a separator from 0 to {vocab_size - 1}, and "
            f"without it none, got {separator}.",
        )
        super().__init__(config, rows, make_block, final_norm=final_norm, key=key)
        self.vocab_size = vocab_size
        self.separator = separator
        head_key = jax.random.split(key, 4)[3]
        std = 0.02 if config.init == "gpt2" else 0.0
        self.head = (
            None if config.tied_head else Linear(config.d_model, rows, std=std, key=head_key)
        )

    def __call__(
        self,
        ids: Ids,
        *,
        lengths: PerSequence | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*batch seq vocab"]:
        """Next-token logits at every position. The first `lengths` ids of a sequence are real
        (default: all); padding follows them. `key` switches dropout on.

        **Raises:** `UserError` as `hidden` does.
        """
        return self.with_aux_loss(ids, Context(lengths=lengths), key=key)[0]

    def with_aux_loss(
        self,
        ids: Ids,
        context: Context = WHOLE_SEQUENCE,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq vocab"], Float[Array, ""]]:
        """The logits, and what a mixture of experts adds to the loss. Layers get `context`."""
        hidden, aux_loss = self.hidden(ids, context, key=key)
        return self.logits(hidden), aux_loss

    def hidden(
        self,
        ids: Ids,
        context: Context = WHOLE_SEQUENCE,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], Float[Array, ""]]:
        """As `Transformer.hidden`; separators among the ids give `context.document_starts`."""
        if self.separator is not None:
            ids = jnp.asarray(ids)
            starts = document_starts(ids, self.separator)
            context = dataclasses.replace(context, document_starts=starts)
        return super().hidden(ids, context, key=key)

    def extend(
        self, ids: Ids, cache: Cache, lengths: PerSequence | None = None
    ) -> tuple[Float[Array, "*batch seq d_model"], Cache]:
        """Hidden states of ids that follow the tokens in `cache`, and the cache with them added.

        The first `lengths` ids of a sequence are real (default: all). All must fit: `cache.length +
        seq` may not exceed the capacity of the cache.

        **Raises:** `UserError` if they do not fit. (In a compiled function, where `cache.length` is
        not known, the last tokens would be overwritten.)
        """
        ids = jnp.asarray(ids)
        seq, back = ids.shape[-1], len(self.previous)
        capacity = cache.ids.shape[-1] - back
        length = 0 if isinstance(cache.length, Tracer) else int(jnp.max(cache.length))
        require(
            length + seq <= capacity,
            f"The cache has room for {capacity} tokens: {length} are in it, got {seq} more.",
        )
        all_ids = write_at(cache.ids, ids.astype(cache.ids.dtype), cache.length + back, axis=-1)
        # Not of `cache.ids`, which a loop would then copy for every token.
        before = read_at(all_ids, cache.length, back, axis=-1)
        starts = None
        if self.separator is not None:
            starts = document_starts(all_ids[..., back:], self.separator)
            starts = read_at(starts, cache.length, seq, axis=-1)
        context = Context(start=cache.length, lengths=lengths, document_starts=starts)
        hidden, layers, _ = self._run(ids, before, cache.layers, context, None)
        return hidden, Cache(
            layers or (), all_ids, cache.length + (seq if lengths is None else lengths)
        )

    def head_weight(self) -> Float[Array, "rows d_model"]:
        """The matrix of the head, gathered from the devices of `fsdp`."""
        table = self.embedding if self.head is None else self.head
        return gathered(table, "embedding" if self.head is None else "head").weight

    def logits(
        self, hidden: Float[Array, "*batch seq d_model"]
    ) -> Float[Array, "*batch seq vocab"]:
        """The logits of hidden states, in at least float32."""
        weight = self.head_weight()
        logits = constrain(project(hidden, weight), "batch", None, "vocab")
        return capped(logits[..., : self.vocab_size], self.config.logit_cap)

    def init_cache(
        self,
        batch: tuple[int, ...] = (),
        context: Context = WHOLE_SEQUENCE,
        capacity: int | None = None,
    ) -> Cache:
        """An empty cache for `capacity` tokens (default: `context_length`) of sequences with the
        leading axes `batch`. Every layer is given `context`."""
        capacity = self.config.context_length if capacity is None else capacity
        dtype = self.embedding.weight.dtype
        layers = self.stack.init_cache(batch, capacity, dtype, context)
        ids = jnp.full((*batch, len(self.previous) + capacity), -1, jnp.int32)
        return Cache(layers, ids, jnp.zeros((), jnp.int32))
