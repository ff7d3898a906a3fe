"""The decoder-only language model."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from gptlite.config import ModelConfig, UserError
from gptlite.models.parts import make_block
from gptlite.models.transformer import Transformer
from gptlite.nn.cache import Cache
from gptlite.nn.linear import Linear, project
from gptlite.nn.softcap import SoftCap
from gptlite.nn.stack import Layers, Stack
from gptlite.sharding import constrain, gathered


class GPT(Transformer):
    """Embedding, a stack of blocks, a final norm and a head (Radford et al., 2019).

    From ids to the next token's logits at every position. One sequence or a batch, the same
    answer: leading axes are whatever they are.

    Measured: a tied head 0.016 ± 0.008 nats worse; without the embeddings of earlier tokens
    (`embed_previous`) 0.073 ± 0.009 nats worse; with biases no difference found (-0.002 ± 0.006)
    (benchmarks/blocks.md).
    """

    head: Linear | None
    cap: SoftCap | None
    vocab_size: int = eqx.field(static=True)

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        padded_vocab_size: int | None = None,
        make_block: Callable[[ModelConfig, PRNGKeyArray], Any] = make_block,
        final_norm: bool = True,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `padded_vocab_size`: rows of the embedding and the head, where a round number is wanted
          for speed; ids from `vocab_size` up are never predicted. Default: `vocab_size`.
        - `make_block`, `final_norm`: see `Transformer`.

        **Raises:** `UserError` if `vocab_size` is below 1 or above `padded_vocab_size`.
        """
        rows = vocab_size if padded_vocab_size is None else padded_vocab_size
        if not 1 <= vocab_size <= rows:
            raise UserError(
                f"The vocabulary must have at least 1 token and at most padded_vocab_size, got "
                f"vocab_size {vocab_size} and padded_vocab_size {rows}."
            )
        super().__init__(config, rows, make_block, final_norm=final_norm, key=key)
        self.vocab_size = vocab_size
        head_key = jax.random.split(key, 4)[3]
        head_std = 0.02 if config.init == "gpt2" else 0.0
        self.head = (
            None if config.tied_head else Linear(config.d_model, rows, std=head_std, key=head_key)
        )
        self.cap = None if config.logit_cap is None else SoftCap(config.logit_cap)

    def hidden(
        self,
        ids: Int[Array, "*batch seq"],
        *,
        padding_mask: Bool[Array, "*batch seq"] | None = None,
        key: PRNGKeyArray | None = None,
        **shared: Any,
    ) -> Float[Array, "*batch seq d_model"]:
        """What the head reads.

        `padding_mask` is False where there is no token, before or after a sequence's own, which
        get what they would without such places. `key` switches dropout on. Every block is given
        `shared`.
        """
        return self._read(ids, padding_mask, key, **shared)

    def extend(
        self,
        ids: Int[Array, "*batch seq"],
        cache: Cache,
        *,
        padding_mask: Bool[Array, "*batch capacity"] | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], Cache]:
        """`hidden` for ids that follow the tokens in `cache`, and the cache with them added.

        They must fit: `cache.length + seq` may not exceed the context length. `padding_mask` is
        for all places of the cache.
        """
        back = len(self.previous)
        ids = ids.astype(cache.ids.dtype)
        if padding_mask is not None:
            here = lax.dynamic_slice_in_dim(padding_mask, cache.length, ids.shape[-1], axis=-1)
            ids = jnp.where(here, ids, -1)
        before = lax.dynamic_slice_in_dim(cache.ids, cache.length, back, axis=-1)
        hidden, layers = self._run(ids, before, cache.layers, cache.length, padding_mask, None)
        all_ids = lax.dynamic_update_slice_in_dim(cache.ids, ids, cache.length + back, axis=-1)
        return hidden, Cache(layers, all_ids, cache.length + ids.shape[-1])

    def logits(
        self, hidden: Float[Array, "*batch seq d_model"]
    ) -> Float[Array, "*batch seq vocab"]:
        """The head, padding of the vocabulary cut off; at least float32."""
        if self.head is None:
            weight = gathered(self.embedding, "embedding").table
        else:
            weight = gathered(self.head, "head").weight
        logits = constrain(project(hidden, weight), "batch", None, "vocab")[..., : self.vocab_size]
        return logits if self.cap is None else self.cap(logits)

    def __call__(
        self,
        ids: Int[Array, "*batch seq"],
        *,
        padding_mask: Bool[Array, "*batch seq"] | None = None,
        key: PRNGKeyArray | None = None,
        **shared: Any,
    ) -> Float[Array, "*batch seq vocab"]:
        """Logits of the token after each. For the arguments, see `hidden`."""
        return self.logits(self.hidden(ids, padding_mask=padding_mask, key=key, **shared))

    def unstacked(self) -> "GPT":
        """The same model with its layers apart, in memory of their own, unless they are to be
        scanned. For loops: taken apart inside one, they would be copied at every turn."""
        if isinstance(self.stack, Layers) or self.stack.scan:
            return self
        return eqx.tree_at(
            lambda model: model.stack, self, eqx.filter_jit(Stack.unstack)(self.stack)
        )

    def init_cache(self, batch: tuple[int, ...] = (), **shared: Any) -> Cache:
        """An empty cache for `context_length` tokens with the leading axes `batch`. Every block is
        given `shared`."""
        context, dtype = self.config.context_length, self.embedding.weight.dtype
        layers = self.stack.init_cache(batch, context, dtype, **shared)
        ids = jnp.full((*batch, len(self.previous) + context), -1, jnp.int32)
        return Cache(layers, ids, jnp.zeros((), jnp.int32))
