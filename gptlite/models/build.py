"""From a config to the blocks that it describes."""

import dataclasses
import inspect
import math
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from gptlite.config import ModelConfig, UserError, block_name
from gptlite.nn.attention import Attention, CrossAttention, Heads, ValueResidual
from gptlite.nn.block import Block, ParallelBlock, PostNorm, PreNorm, SandwichNorm
from gptlite.nn.mlp import ACTIVATIONS, MLP, GatedMLP, MoE
from gptlite.nn.norms import DyT, LayerNorm, RMSNorm
from gptlite.nn.positions import ALiBi, NoPositions, RelativeBias, Rotary


def make_block(
    config: ModelConfig,
    key: PRNGKeyArray,
    *,
    causal: bool | None = None,
    cross_attention: bool = False,
) -> Any:
    """One layer as `config` describes it: of a `GPT`; with `causal` False, of an encoder; with
    `causal` True and `cross_attention`, of a decoder that reads an encoder.

    **Raises:** `UserError` if `config.block` has no cross-attention and is to have one.
    """
    if config.block not in ("parallel", *RESIDUALS):
        if cross_attention:
            raise _no_cross_attention(config)
        return make_own(config.block, config, key, causal=causal)
    attention_key, mlp_key = jax.random.split(key)
    norm_keys = iter(jax.random.split(jax.random.fold_in(key, 2), 6))
    parts = {
        "attention": make_attention(config, attention_key, causal=causal),
        "mlp": make_mlp(config, mlp_key),
        "dropout": config.dropout,
    }
    if config.block == "parallel":
        if cross_attention:
            raise _no_cross_attention(config)
        return ParallelBlock(norm=make_norm(config, next(norm_keys)), **parts)
    kind = RESIDUALS[config.block]

    def residual():
        return kind(*[make_norm(config, next(norm_keys)) for _ in dataclasses.fields(kind)])

    if cross_attention:
        heads = make_heads(config, jax.random.fold_in(key, 3))
        parts["cross_attention"] = CrossAttention(heads, config.attention_dropout)
        parts["cross_residual"] = residual()
    return Block(attention_residual=residual(), mlp_residual=residual(), **parts)


RESIDUALS: dict[Any, Any] = {"pre": PreNorm, "post": PostNorm, "sandwich": SandwichNorm}


def _no_cross_attention(config: ModelConfig) -> UserError:
    return UserError(
        f"The block of an encoder-decoder must be one of {', '.join(RESIDUALS)}, got "
        f"{block_name(config.block)}."
    )


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
    sliding = config.attention == "sliding"
    if sliding and causal is False:
        raise UserError("An encoder sees all tokens: attention must be full, got sliding.")
    return Attention(
        make_heads(config, key),
        positions=Rotary() if config.positions == "rotary" else NoPositions(),
        score_bias=score_bias,
        value_residual=ValueResidual() if config.value_residual else None,
        causal=causal is not False,
        window=config.window if sliding else None,
        dropout=config.attention_dropout,
    )


def make_heads(config: ModelConfig, key: PRNGKeyArray) -> Heads:
    """The matrices of attention as `config` describes them."""
    std, output_std = init_stds(config)
    return Heads(
        config.d_model,
        config.n_heads,
        n_kv_heads=config.n_kv_heads,
        qk_norm=config.qk_norm,
        std=std,
        output_std=output_std,
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
    # At zero input the gradient of RMSNorm is 1/sqrt(eps), about 1,000.
    return std, std if config.block == "sandwich" else 0.0
