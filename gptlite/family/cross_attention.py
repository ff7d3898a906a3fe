"""The decoder's block of an encoder-decoder: with attention to the encoder's output."""

from typing import Any

import equinox as eqx
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from gptlite.config import ModelConfig
from gptlite.errors import UserError
from gptlite.models.build import make_block, make_heads, make_part
from gptlite.nn.attention import Heads, identity_values, padding_mask
from gptlite.nn.block import Block, PostNorm, PreNorm, drop, split_key
from gptlite.nn.context import WHOLE_SEQUENCE, Context, PerSequence
from gptlite.nn.dot_product import Keys, attend
from gptlite.nn.variants.blocks import SandwichNorm

# The residual connections of a block with cross-attention, and how many norms each has.
RESIDUALS: dict[str, tuple[Any, int]] = {
    "pre": (PreNorm, 1),
    "post": (PostNorm, 1),
    "sandwich": (SandwichNorm, 2),
}


class MemoryKV(eqx.Module):
    """The keys and values that one layer of a decoder makes of an encoder's output."""

    keys: Keys
    values: Keys
    lengths: PerSequence | None
    """How many of the encoder's tokens are real. None: all."""


class CrossAttention(eqx.Module):
    """Multi-head attention of a decoder to an encoder's output (Vaswani et al., 2017, section
    3.2.3)."""

    heads: Heads
    dropout: float = eqx.field(static=True, default=0.0)

    def read(
        self, memory: Float[Array, "*batch keys d_model"], lengths: PerSequence | None = None
    ) -> MemoryKV:
        """The keys and values of an encoder's output, the same for every token of the target."""
        return MemoryKV(
            keys=self.heads.split(self.heads.key(memory), self.heads.key_norm),
            values=self.heads.split(self.heads.value(memory)),
            lengths=lengths,
        )

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        memory: MemoryKV,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*batch seq d_model"]:
        """`key` switches dropout on."""
        return self.heads.join(self._attend(x, memory, memory.values, key))

    def weights(
        self,
        x: Float[Array, "*batch seq d_model"],
        memory: MemoryKV,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*batch heads seq keys"]:
        """As `Attention.weights`."""
        return self._attend(x, memory, identity_values(memory.keys), None)

    def _attend(
        self,
        x: Float[Array, "*batch seq d_model"],
        memory: MemoryKV,
        values: Float[Array, "*batch kv_heads keys d_value"],
        key: PRNGKeyArray | None,
    ) -> Float[Array, "*batch heads seq d_value"]:
        q = self.heads.split(self.heads.query(x), self.heads.query_norm)
        mask = padding_mask(memory.keys.shape[-2], memory.lengths)
        return attend(q, memory.keys, values, None, mask, dropout=self.dropout, dropout_key=key)


class BlockCache(eqx.Module):
    """The keys and values that a `DecoderBlock` keeps."""

    attention: Any
    memory: MemoryKV


class DecoderBlock(Block):
    """A `Block` with cross-attention between attention and MLP (Vaswani et al., 2017, section
    3.1)."""

    cross_attention: Any = None
    """A `CrossAttention`."""
    cross_residual: Any = None

    def init_cache(
        self,
        batch: tuple[int, ...],
        capacity: int,
        dtype: DTypeLike,
        context: Context = WHOLE_SEQUENCE,
    ) -> BlockCache:
        """As `Block.init_cache`, with what is read of `context.memory`."""
        cache = super().init_cache(batch, capacity, dtype, context)
        return BlockCache(cache, self._read_memory(context))

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: BlockCache | None = None,
        context: Context = WHOLE_SEQUENCE,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], BlockCache | None, Float[Array, ""]]:
        """As `Block`.

        **Raises:** `ValueError` (while tracing) if there is neither a cache nor `context.memory`.
        """
        keys = split_key(key, 5)
        own = None if cache is None else cache.attention
        x, own = self._add_attention(x, own, context, keys[0], keys[1])
        memory = self._read_memory(context) if cache is None else cache.memory
        y = self.cross_attention(self.cross_residual.before(x), memory, key=keys[2])
        x = self.cross_residual.after(x, drop(y, self.dropout, keys[3]))
        x, aux_loss = self._add_mlp(x, context, keys[4])
        return x, None if cache is None else BlockCache(own, memory), aux_loss

    def _read_memory(self, context: Context) -> MemoryKV:
        if context.memory is None:
            raise ValueError("A block with cross-attention needs a cache or context.memory.")
        return self.cross_attention.read(context.memory, context.memory_lengths)


def make_decoder_block(
    config: ModelConfig, key: PRNGKeyArray, *, layer: Int[Array, ""]
) -> DecoderBlock:
    """The block that `config` describes, with cross-attention, which has the sizes, biases and
    QK-norm of `config`, and not the options of `config.attention`.

    **Raises:** `UserError` if `config.block` cannot have cross-attention.
    """
    if config.block not in RESIDUALS:
        raise UserError(
            f"The block of an encoder-decoder must be one of {', '.join(RESIDUALS)}, got "
            f"{config.block}."
        )
    residual, n_norms = RESIDUALS[config.block]
    # After the keys that `make_block` uses.
    _, _, cross_key, *norm_keys = jax.random.split(key, 3 + 3 * n_norms)
    return DecoderBlock(
        **vars(make_block(config, key, layer=layer)),
        cross_attention=CrossAttention(make_heads(config, cross_key), config.attention_dropout),
        cross_residual=residual(
            *[make_part("norm", config, key, layer=layer) for key in norm_keys[2 * n_norms :]]
        ),
    )
