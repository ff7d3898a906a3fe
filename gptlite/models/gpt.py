"""The decoder-only language model."""

import functools
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from gptlite.config import ModelConfig, UserError
from gptlite.nn.attention import Attention
from gptlite.nn.block import Block
from gptlite.nn.cache import Cache, LayerCache
from gptlite.nn.embedding import Embedding
from gptlite.nn.linear import Linear, project
from gptlite.nn.mlp import ACTIVATIONS, MLP, SwiGLU
from gptlite.nn.norms import LayerNorm, RMSNorm
from gptlite.nn.positions import Learned, NoPositions, Offset, Rotary, Sinusoidal
from gptlite.nn.stack import Layers, Stack


class GPT(eqx.Module):
    """Embedding, a stack of blocks, a final norm and a head (Radford et al., 2019).

    From ids to the next token's logits at every position. One sequence or a batch, the same
    answer: leading axes are whatever they are.
    """

    embedding: Embedding
    previous: tuple[Embedding, ...]
    positions: Callable
    dropout: eqx.nn.Dropout
    stack: Stack | Layers
    norm: Callable
    head: Linear | None
    config: ModelConfig = eqx.field(static=True)
    vocab_size: int = eqx.field(static=True)

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        padded_vocab_size: int | None = None,
        key: PRNGKeyArray,
    ):
        """`padded_vocab_size`: rows of the embedding and the head, where a round number is wanted
        for speed; ids from `vocab_size` up are never predicted. Default: `vocab_size`.

        **Raises:** `UserError` if `vocab_size` is below 1 or above `padded_vocab_size`.
        """
        rows = vocab_size if padded_vocab_size is None else padded_vocab_size
        if not 1 <= vocab_size <= rows:
            raise UserError(
                f"The vocabulary must have at least 1 token and at most padded_vocab_size, got "
                f"vocab_size {vocab_size} and padded_vocab_size {rows}."
            )
        embedding_key, positions_key, stack_key, head_key = jax.random.split(key, 4)
        d_model = config.d_model
        self.config = config
        self.vocab_size = vocab_size
        # A head that shares the embedding's matrix wants it small: logits start near 0.
        embedding_std = 0.02 if config.init == "gpt2" or config.tied_head else 1.0
        self.embedding = Embedding(rows, d_model, std=embedding_std, key=embedding_key)
        self.previous = tuple(
            Embedding(rows, d_model, std=0.0, key=embedding_key)
            for _ in range(config.embed_previous)
        )
        if config.positions == "learned":
            self.positions = Learned(
                config.context_length, d_model, std=embedding_std, key=positions_key
            )
        else:
            self.positions = Sinusoidal() if config.positions == "sinusoidal" else NoPositions()
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.stack = Stack(
            functools.partial(make_block, config),
            config.n_layers,
            scan=config.stack == "scan",
            key=stack_key,
        )
        self.norm = make_norm(config)
        head_std = 0.02 if config.init == "gpt2" else 0.0
        self.head = None if config.tied_head else Linear(d_model, rows, std=head_std, key=head_key)

    def hidden(
        self, ids: Int[Array, "*batch seq"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "*batch seq d_model"]:
        """What the head reads. `key` switches dropout on."""
        nothing = jnp.full((*ids.shape[:-1], len(self.previous)), -1, ids.dtype)
        return self._run(ids, nothing, None, 0, key)[0]

    def extend(
        self, ids: Int[Array, "*batch seq"], cache: Cache
    ) -> tuple[Float[Array, "*batch seq d_model"], Cache]:
        """`hidden` for ids that follow the tokens in `cache`, and the cache with them added.

        They must fit: `cache.length + seq` may not exceed the context length.
        """
        back = len(self.previous)
        ids = ids.astype(cache.ids.dtype)
        before = lax.dynamic_slice_in_dim(cache.ids, cache.length, back, axis=-1)
        hidden, layers = self._run(ids, before, cache.layers, cache.length, None)
        all_ids = lax.dynamic_update_slice_in_dim(cache.ids, ids, cache.length + back, axis=-1)
        return hidden, Cache(layers, all_ids, cache.length + ids.shape[-1])

    def _run(
        self,
        ids: Int[Array, "*batch seq"],
        before: Int[Array, "*batch back"],
        caches: PyTree,
        offset: Offset,
        key: PRNGKeyArray | None,
    ) -> tuple[Float[Array, "*batch seq d_model"], PyTree]:
        embedding_key, stack_key = (None, None) if key is None else jax.random.split(key)
        x = self.embedding(ids)
        back, seq = before.shape[-1], ids.shape[-1]
        with_before = jnp.concatenate([before, ids], axis=-1)
        for lag, embedding in enumerate(self.previous, start=1):
            x = x + embedding(with_before[..., back - lag : back - lag + seq])
        x = self.positions(x, offset)
        x = self.dropout(x, key=embedding_key, inference=key is None)
        x, caches = self.stack(x, caches, offset, key=stack_key)
        return self.norm(x), caches

    def logits(
        self, hidden: Float[Array, "*batch seq d_model"]
    ) -> Float[Array, "*batch seq vocab"]:
        """The head, padding cut off; at least float32."""
        weight = self.embedding.weight if self.head is None else self.head.weight
        return project(hidden, weight)[..., : self.vocab_size]

    def __call__(
        self, ids: Int[Array, "*batch seq"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "*batch seq vocab"]:
        """Logits of the token after each. `key` switches dropout on."""
        return self.logits(self.hidden(ids, key=key))

    def unstacked(self) -> "GPT":
        """The same model with its layers apart, in memory of their own, unless they are to be
        scanned. For loops: taken apart inside one, they would be copied at every turn."""
        if isinstance(self.stack, Layers) or self.stack.scan:
            return self
        return eqx.tree_at(
            lambda model: model.stack, self, eqx.filter_jit(Stack.unstack)(self.stack)
        )

    def init_cache(self, batch: tuple[int, ...] = ()) -> Cache:
        """An empty key/value cache for `context_length` tokens with the leading axes `batch`."""
        config = self.config
        empty = jnp.zeros(
            (math.prod(batch) * config.n_heads, config.context_length, config.d_head),
            self.embedding.weight.dtype,
        )
        layers = self.stack.init_cache(lambda: LayerCache(keys=empty, values=empty))
        ids = jnp.full((*batch, len(self.previous) + config.context_length), -1, jnp.int32)
        return Cache(layers, ids, jnp.zeros((), jnp.int32))


def make_block(config: ModelConfig, key: PRNGKeyArray) -> Block:
    """One layer as `config` describes it."""
    attention_key, mlp_key = jax.random.split(key)
    d_model, d_ff = config.d_model, config.d_hidden
    if config.init == "gpt2":
        # Radford et al., 2019, section 2.3: what adds to the residual stream starts smaller.
        std = 0.02
        residual_std = std / math.sqrt(2 * config.n_layers)
    else:
        std, residual_std = 1.0 / math.sqrt(d_model), 0.0
    attention = Attention(
        d_model,
        config.n_heads,
        positions=Rotary() if config.positions == "rotary" else NoPositions(),
        qk_norm=config.qk_norm,
        dropout=config.attention_dropout,
        std=std,
        output_std=residual_std,
        bias=config.bias,
        key=attention_key,
    )
    if config.mlp == "swiglu":
        mlp = SwiGLU(d_model, d_ff, std=std, down_std=residual_std, bias=config.bias, key=mlp_key)
    else:
        mlp = MLP(
            d_model,
            d_ff,
            activation=ACTIVATIONS[config.mlp],
            std=std,
            down_std=residual_std,
            bias=config.bias,
            key=mlp_key,
        )
    return Block(
        attention_norm=make_norm(config),
        attention=attention,
        mlp_norm=make_norm(config),
        mlp=mlp,
        dropout=eqx.nn.Dropout(config.dropout),
    )


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """The norm that `config` names."""
    if config.norm == "layer":
        return LayerNorm(config.d_model, bias=config.bias)
    return RMSNorm(config.d_model)
