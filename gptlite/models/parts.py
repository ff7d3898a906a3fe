"""From the config to the parts that it describes."""

import inspect
import math
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray

from gptlite.config import ModelConfig, UserError, block_name
from gptlite.nn.attention import Attention, CrossAttention
from gptlite.nn.block import Block, ParallelBlock, PostNormBlock, SandwichBlock
from gptlite.nn.decoder_block import DecoderBlock, PostNormDecoderBlock
from gptlite.nn.masks import Bidirectional, Causal, Mask, SlidingWindow
from gptlite.nn.mlp import ACTIVATIONS, MLP, GatedMLP, MoE
from gptlite.nn.norms import DyT, LayerNorm, RMSNorm
from gptlite.nn.positions import ALiBi, NoPositions, RelativeBias, Rotary


def make_block(config: ModelConfig, key: PRNGKeyArray, *, causal: bool | None = None) -> Any:
    """One layer as `config` describes it: of a `GPT`; with `causal` True, of a model that has an
    encoder, too; with False, of that encoder."""
    if not isinstance(config.block, str) or config.block not in BLOCKS:
        return make_own(config.block, config, key, causal=causal)
    kind, norms = BLOCKS[config.block]
    return _assemble(kind, norms, config, key, causal=causal)


def make_decoder_block(config: ModelConfig, key: PRNGKeyArray) -> Any:
    """One layer of a decoder that reads an encoder, as `config` describes it.

    **Raises:** `UserError` if `config.block` is neither `pre` nor `post`.
    """
    if config.block not in DECODER_BLOCKS:
        raise UserError(
            "The block of an encoder-decoder must be one of "
            f"{', '.join(DECODER_BLOCKS)}, got {block_name(config.block)}."
        )
    cross_attention = CrossAttention(**_heads(config), key=jax.random.fold_in(key, 3))
    kind, norms = DECODER_BLOCKS[config.block]
    return _assemble(kind, norms, config, key, causal=True, cross_attention=cross_attention)


def _assemble(
    kind: type,
    norms: tuple[str, ...],
    config: ModelConfig,
    key: PRNGKeyArray,
    *,
    causal: bool | None,
    **parts: Any,
) -> Any:
    attention_key, mlp_key = jax.random.split(key)
    keys = jax.random.split(jax.random.fold_in(key, 2), len(norms))
    return kind(
        attention=make_attention(config, attention_key, causal=causal),
        mlp=make_mlp(config, mlp_key),
        dropout=eqx.nn.Dropout(config.dropout),
        **{name: make_norm(config, k) for name, k in zip(norms, keys, strict=True)},
        **parts,
    )


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
DECODER_BLOCKS: dict[Any, tuple[type, tuple[str, ...]]] = {
    "pre": (DecoderBlock, ("attention_norm", "cross_norm", "mlp_norm")),
    "post": (PostNormDecoderBlock, ("attention_norm", "cross_norm", "mlp_norm")),
}


def make_attention(config: ModelConfig, key: PRNGKeyArray, *, causal: bool | None = None) -> Any:
    """Attention as `config` describes it; for `causal`, see `make_block`.

    **Raises:** `UserError` if an encoder's is to be sliding.
    """
    if config.attention not in ("full", "sliding"):
        return make_own(config.attention, config, key, causal=causal)
    score_bias = None
    if config.positions == "alibi":
        score_bias = ALiBi(config.n_heads)
    elif config.positions == "relative":
        bias_key = jax.random.fold_in(key, 0)
        score_bias = RelativeBias(config.n_heads, both_ways=causal is False, key=bias_key)
    mask: Mask = Bidirectional() if causal is False else Causal()
    if config.attention == "sliding":
        if causal is False:
            raise UserError("An encoder sees all its places: attention must be full, got sliding.")
        mask = SlidingWindow(config.window)
    return Attention(
        **_heads(config),
        positions=Rotary() if config.positions == "rotary" else NoPositions(),
        score_bias=score_bias,
        mask=mask,
        value_residual=config.value_residual,
        key=key,
    )


def _heads(config: ModelConfig) -> dict[str, Any]:
    """What self-attention and cross-attention have in common: see `MultiHead`."""
    std, output_std = init_stds(config)
    return {
        "d_model": config.d_model,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "qk_norm": config.qk_norm,
        "dropout": config.attention_dropout,
        "std": std,
        "output_std": output_std,
        "bias": config.bias,
    }


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


def make_own(
    block: str | type, config: ModelConfig, key: PRNGKeyArray, *, causal: bool | None = None
) -> Any:
    """A block of the user's own, which is told of `causal` where that is not None.

    **Raises:** `UserError` if it is but a name, or is to be told and cannot.
    """
    if isinstance(block, str):
        raise UserError(f"{block} has not been loaded: see gptlite.own.load_own.")
    if causal is None:
        return block(config, key=key)
    if "causal" not in inspect.signature(block).parameters:
        raise UserError(
            f"{block_name(block)} must take causal=, to serve in a model with an encoder: False "
            "there, where every token sees every other, and True in the decoder."
        )
    return block(config, causal=causal, key=key)


def init_stds(config: ModelConfig) -> tuple[float, float]:
    """Standard deviations of a block's matrices: those that read the residual stream, and those
    that write to it."""
    if config.init == "gpt2":
        # Radford et al., 2019, section 2.3: what adds to the residual stream starts smaller.
        return 0.02, 0.02 / math.sqrt(2 * config.n_layers)
    std = 1.0 / math.sqrt(config.d_model)
    # A norm of zeros has a slope of a thousand.
    return std, std if config.block == "sandwich" else 0.0
