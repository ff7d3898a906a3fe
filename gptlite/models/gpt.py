"""The decoder-only language model."""

import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from gptlite.config import ModelConfig, UserError
from gptlite.nn.attention import Attention
from gptlite.nn.block import Block, ParallelBlock, PostNormBlock, SandwichBlock
from gptlite.nn.cache import Cache
from gptlite.nn.embedding import Embedding
from gptlite.nn.linear import Linear, project
from gptlite.nn.masks import Causal, SlidingWindow
from gptlite.nn.mlp import ACTIVATIONS, MLP, GatedMLP, MoE
from gptlite.nn.norms import DyT, LayerNorm, RMSNorm
from gptlite.nn.positions import (
    ALiBi,
    Learned,
    NoPositions,
    Offset,
    RelativeBias,
    Rotary,
    Sinusoidal,
)
from gptlite.nn.softcap import SoftCap
from gptlite.nn.stack import Layers, Stack


class GPT(eqx.Module):
    """Embedding, a stack of blocks, a final norm and a head (Radford et al., 2019).

    From ids to the next token's logits at every position. One sequence or a batch, the same
    answer: leading axes are whatever they are.

    Measured: a tied head 0.016 ± 0.008 nats worse; without the embeddings of earlier tokens
    (`embed_previous`) 0.073 ± 0.009 nats worse; with biases no difference found (-0.002 ± 0.006)
    (benchmarks/blocks.md).
    """

    embedding: Embedding
    previous: tuple[Embedding, ...]
    positions: Callable
    dropout: eqx.nn.Dropout
    stack: Stack | Layers
    norm: Callable
    head: Linear | None
    cap: SoftCap | None
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
        self.norm = make_norm(config, jax.random.fold_in(stack_key, config.n_layers))
        head_std = 0.02 if config.init == "gpt2" else 0.0
        self.head = None if config.tied_head else Linear(d_model, rows, std=head_std, key=head_key)
        self.cap = None if config.logit_cap is None else SoftCap(config.logit_cap)

    def hidden(
        self,
        ids: Int[Array, "*batch seq"],
        *,
        padding_mask: Bool[Array, "*batch seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*batch seq d_model"]:
        """What the head reads.

        `padding_mask` is False where there is no token, before or after a sequence's own, which
        get what they would without such places. `key` switches dropout on.
        """
        if padding_mask is not None:
            ids = jnp.where(padding_mask, ids, -1)
        nothing = jnp.full((*ids.shape[:-1], len(self.previous)), -1, ids.dtype)
        return self._run(ids, nothing, None, 0, padding_mask, key)[0]

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

    def _run(
        self,
        ids: Int[Array, "*batch seq"],
        before: Int[Array, "*batch back"],
        caches: PyTree,
        offset: Offset,
        padding_mask: Bool[Array, "*batch places"] | None,
        key: PRNGKeyArray | None,
    ) -> tuple[Float[Array, "*batch seq d_model"], PyTree]:
        embedding_key, stack_key = (None, None) if key is None else jax.random.split(key)
        back, seq = before.shape[-1], ids.shape[-1]
        shared: dict[str, Array] = {}
        first = offset
        if padding_mask is not None:
            shared["padding_mask"] = padding_mask
            # A sequence begins at its first token.
            first = offset - jnp.argmax(padding_mask, axis=-1)
        x = self.embedding(ids)
        with_before = jnp.concatenate([before, ids], axis=-1)
        for lag, embedding in enumerate(self.previous, start=1):
            x = x + embedding(with_before[..., back - lag : back - lag + seq])
        x = self.positions(x, first)
        x = self.dropout(x, key=embedding_key, inference=key is None)
        if self.config.value_residual:
            shared["first_values"] = self.stack.first.first_values(x)
        x, caches = self.stack(x, caches, offset, key=stack_key, **shared)
        return self.norm(x), caches

    def logits(
        self, hidden: Float[Array, "*batch seq d_model"]
    ) -> Float[Array, "*batch seq vocab"]:
        """The head, padding of the vocabulary cut off; at least float32."""
        weight = self.embedding.weight if self.head is None else self.head.weight
        logits = project(hidden, weight)[..., : self.vocab_size]
        return logits if self.cap is None else self.cap(logits)

    def __call__(
        self,
        ids: Int[Array, "*batch seq"],
        *,
        padding_mask: Bool[Array, "*batch seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*batch seq vocab"]:
        """Logits of the token after each. For `padding_mask` and `key`, see `hidden`."""
        return self.logits(self.hidden(ids, padding_mask=padding_mask, key=key))

    def unstacked(self) -> "GPT":
        """The same model with its layers apart, in memory of their own, unless they are to be
        scanned. For loops: taken apart inside one, they would be copied at every turn."""
        if isinstance(self.stack, Layers) or self.stack.scan:
            return self
        return eqx.tree_at(
            lambda model: model.stack, self, eqx.filter_jit(Stack.unstack)(self.stack)
        )

    def init_cache(self, batch: tuple[int, ...] = ()) -> Cache:
        """An empty cache for `context_length` tokens with the leading axes `batch`."""
        context = self.config.context_length
        layers = self.stack.init_cache(math.prod(batch), context, self.embedding.weight.dtype)
        ids = jnp.full((*batch, len(self.previous) + context), -1, jnp.int32)
        return Cache(layers, ids, jnp.zeros((), jnp.int32))


def make_block(config: ModelConfig, key: PRNGKeyArray) -> Any:
    """One layer as `config` describes it."""
    if not isinstance(config.block, str) or config.block not in BLOCKS:
        return make_own(config.block, config, key)
    attention_key, mlp_key = jax.random.split(key)
    parts = {
        "attention": make_attention(config, attention_key),
        "mlp": make_mlp(config, mlp_key),
        "dropout": eqx.nn.Dropout(config.dropout),
    }
    kind, norms = BLOCKS[config.block]
    keys = jax.random.split(jax.random.fold_in(key, 2), len(norms))
    parts |= {name: make_norm(config, k) for name, k in zip(norms, keys, strict=True)}
    return kind(**parts)


# Each with the names of its norms.
BLOCKS: dict[str, tuple[type, tuple[str, ...]]] = {
    "pre": (Block, ("attention_norm", "mlp_norm")),
    "post": (PostNormBlock, ("attention_norm", "mlp_norm")),
    "sandwich": (
        SandwichBlock,
        ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
    ),
    "parallel": (ParallelBlock, ("norm",)),
}


def make_attention(config: ModelConfig, key: PRNGKeyArray) -> Any:
    """Attention as `config` describes it."""
    if config.attention not in ("full", "sliding"):
        return make_own(config.attention, config, key)
    std, residual_std = init_stds(config)
    score_bias = None
    if config.positions == "alibi":
        score_bias = ALiBi(config.n_heads)
    elif config.positions == "relative":
        score_bias = RelativeBias(config.n_heads, key=jax.random.fold_in(key, 0))
    return Attention(
        config.d_model,
        config.n_heads,
        n_kv_heads=config.n_kv_heads,
        positions=Rotary() if config.positions == "rotary" else NoPositions(),
        score_bias=score_bias,
        mask=SlidingWindow(config.window) if config.attention == "sliding" else Causal(),
        qk_norm=config.qk_norm,
        value_residual=config.value_residual,
        dropout=config.attention_dropout,
        std=std,
        output_std=residual_std,
        bias=config.bias,
        key=key,
    )


def make_mlp(config: ModelConfig, key: PRNGKeyArray) -> Any:
    """The MLP as `config` describes it."""
    d_model, d_ff = config.d_model, config.d_hidden
    std, down_std = init_stds(config)
    if config.mlp == "moe":
        return MoE(
            d_model,
            max(1, d_ff // config.experts_per_token),
            n_experts=config.n_experts,
            experts_per_token=config.experts_per_token,
            balance_loss=config.balance_loss,
            std=std,
            down_std=down_std,
            key=key,
        )
    stds = {"std": std, "down_std": down_std}
    gated = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}
    if config.mlp in gated:
        act = gated[config.mlp]
        return GatedMLP(d_model, d_ff, activation=act, **stds, bias=config.bias, key=key)
    if config.mlp in ACTIVATIONS:
        act = ACTIVATIONS[config.mlp]
        return MLP(d_model, d_ff, activation=act, **stds, bias=config.bias, key=key)
    return make_own(config.mlp, config, key)


def make_norm(config: ModelConfig, key: PRNGKeyArray) -> Any:
    """The norm as `config` describes it."""
    if config.norm == "rms":
        return RMSNorm(config.d_model)
    if config.norm == "layer":
        return LayerNorm(config.d_model, bias=config.bias)
    if config.norm == "dyt":
        return DyT(config.d_model, bias=config.bias)
    return make_own(config.norm, config, key)


def make_own(block: str | type, config: ModelConfig, key: PRNGKeyArray) -> Any:
    """A block of the user's own.

    **Raises:** `UserError` if it is but a name.
    """
    if isinstance(block, str):
        raise UserError(f"{block} has not been loaded: see gptlite.own.load_own.")
    return block(config, key=key)


def init_stds(config: ModelConfig) -> tuple[float, float]:
    """Standard deviations of a block's matrices: those that read the residual stream, and those
    that write to it."""
    if config.init == "gpt2":
        # Radford et al., 2019, section 2.3: what adds to the residual stream starts smaller.
        return 0.02, 0.02 / math.sqrt(2 * config.n_layers)
    std = 1.0 / math.sqrt(config.d_model)
    # A norm of zeros has a slope of a thousand.
    return std, std if config.block == "sandwich" else 0.0
