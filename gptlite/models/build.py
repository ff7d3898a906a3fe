"""From a config to the blocks that it describes.

Each table holds the package's blocks by the name that a config has for them. An entry is called as
`make(config, key=key, ...)`. Its other keyword arguments are the block's own options, which follow
the name in a config, as in `moe:n_experts=8`; their annotations say what they may be. Custom blocks
are called in the same way.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args

import jax
from jaxtyping import PRNGKeyArray

from gptlite.config import ModelConfig
from gptlite.errors import UserError
from gptlite.machine.fields import Between, check_value
from gptlite.machine.names import CUSTOM, split_options
from gptlite.nn.attention import Attention, Heads
from gptlite.nn.block import Block, ParallelBlock, PostNorm, PreNorm, SandwichNorm
from gptlite.nn.mlp import ACTIVATIONS, MLP, GatedMLP, MoE, gelu, silu
from gptlite.nn.norms import DyT, LayerNorm, RMSNorm
from gptlite.nn.positions import (
    ALiBi,
    Learned,
    NoPositions,
    RelativeBias,
    Rotary,
    RotaryScaling,
    Sinusoidal,
)

Count = Annotated[int, Between(1, 10_000_000)]
Epsilon = Annotated[float, Between(0.0, 1.0, above=True)]


def make_block(config: ModelConfig, key: PRNGKeyArray, *, causal: bool = True) -> Any:
    """One layer as `config` describes it: of a `GPT`, or without `causal` of an encoder."""
    return make_part("block", config, key, causal=causal)


def _residual_block(residual: Any, n_norms: int) -> Callable[..., Any]:
    def make(config, *, causal=True, key):
        attention_key, mlp_key, _, *norm_keys = jax.random.split(key, 3 + 2 * n_norms)

        def make_residual(i):
            keys = norm_keys[i * n_norms : (i + 1) * n_norms]
            return residual(*[make_part("norm", config, key) for key in keys])

        return Block(
            attention=make_part("attention", config, attention_key, causal=causal),
            attention_residual=make_residual(0),
            mlp=make_part("mlp", config, mlp_key),
            mlp_residual=make_residual(1),
            dropout=config.dropout,
        )

    return make


def _parallel_block(config, *, causal=True, key):
    attention_key, mlp_key, norm_key = jax.random.split(key, 3)
    return ParallelBlock(
        attention=make_part("attention", config, attention_key, causal=causal),
        mlp=make_part("mlp", config, mlp_key),
        norm=make_part("norm", config, norm_key),
        dropout=config.dropout,
    )


def _full_attention(
    config,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_gain: bool = False,
    qk_eps: Epsilon = 1e-6,
    causal=True,
    key,
):
    if qk_gain and not config.qk_norm:
        raise UserError("qk_gain in model.attention is of the QK-norm: it needs model.qk_norm.")
    heads_key, positions_key = jax.random.split(key)
    positions = make_positions(config, positions_key, added=False, causal=causal)
    return Attention(
        make_heads(
            config,
            heads_key,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_gain=qk_gain,
            qk_eps=qk_eps,
        ),
        positions=positions if isinstance(positions, Rotary) else NoPositions(),
        score_bias=positions if isinstance(positions, ALiBi | RelativeBias) else None,
        causal=causal,
        dropout=config.attention_dropout,
    )


def _sliding_attention(
    config,
    *,
    window: Count = 64,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_gain: bool = False,
    qk_eps: Epsilon = 1e-6,
    causal=True,
    key,
):
    if not causal:
        raise UserError("An encoder sees all tokens: model.attention must be full, got sliding.")
    attention = _full_attention(
        config,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_gain=qk_gain,
        qk_eps=qk_eps,
        key=key,
    )
    return dataclasses.replace(attention, window=window)


def make_positions(
    config: ModelConfig, key: PRNGKeyArray, *, added: bool, causal: bool = True
) -> Any:
    """The positions that `config` describes, if they are of this kind: `added` to the embeddings,
    or used by attention. Else `NoPositions`."""
    name, _ = split_options(config.positions)
    if added != (name in ("learned", "sinusoidal")):
        return NoPositions()
    return make_part("positions", config, key, causal=causal)


def make_heads(
    config: ModelConfig,
    key: PRNGKeyArray,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_gain: bool = False,
    qk_eps: float = 1e-6,
) -> Heads:
    """The matrices of attention as `config` describes them."""
    std, output_std = init_stds(config)
    return Heads(
        config.d_model,
        config.n_heads,
        n_kv_heads=config.n_kv_heads,
        d_head=config.head_size,
        qk_norm=config.qk_norm,
        qk_gain=qk_gain,
        qk_eps=qk_eps,
        std=std,
        output_std=output_std,
        qkv_bias=config.bias or qkv_bias,
        output_bias=config.bias or output_bias,
        key=key,
    )


def _mlp(kind: Any, activation: Callable) -> Callable[..., Any]:
    def make(config, *, key):
        std, down_std = init_stds(config)
        return kind(
            config.d_model,
            config.d_hidden,
            activation=activation,
            std=std,
            down_std=down_std,
            bias=config.bias,
            key=key,
        )

    return make


def _moe(
    config,
    *,
    n_experts: Annotated[int, Between(1, 10_000)] = 4,
    experts_per_token: Annotated[int, Between(1, 10_000)] = 2,
    balance_loss: Annotated[float, Between(0.0)] = 0.01,
    key,
):
    Between(1, n_experts).check("experts_per_token in model.mlp moe", experts_per_token)
    std, down_std = init_stds(config)
    return MoE(
        config.d_model,
        max(1, config.d_hidden // experts_per_token),
        n_experts=n_experts,
        experts_per_token=experts_per_token,
        balance_loss=balance_loss,
        std=std,
        down_std=down_std,
        key=key,
    )


def _relative(
    config,
    *,
    buckets: Annotated[int, Between(2, 10_000)] = 32,
    max_distance: Count = 128,
    causal=True,
    key,
):
    return RelativeBias(
        config.n_heads,
        buckets=buckets,
        max_distance=max_distance,
        bidirectional=not causal,
        key=key,
    )


def _rotary(
    config,
    *,
    theta: Annotated[float, Between(1.0, above=True)] = 10_000.0,
    factor: Annotated[float, Between(1.0)] = 1.0,
    low_frequency: Annotated[float, Between(0.0, above=True)] = 1.0,
    high_frequency: Annotated[float, Between(0.0, above=True)] = 4.0,
    original_context: Count = 8192,
    causal=True,
    key,
):
    if low_frequency >= high_frequency:
        raise UserError(
            "low_frequency in model.positions rotary must be below high_frequency, got "
            f"{low_frequency} and {high_frequency}."
        )
    scaling = RotaryScaling(factor, low_frequency, high_frequency, original_context)
    return Rotary(theta, scaling if factor > 1 else None)


def _rms_norm(config, *, eps: Epsilon = 1e-6, key):
    return RMSNorm(config.d_model, eps=eps)


def _layer_norm(config, *, eps: Epsilon = 1e-5, key):
    return LayerNorm(config.d_model, bias=config.bias, eps=eps)


def _learned(config, *, causal=True, key):
    return Learned(config.context_length, config.d_model, std=embedding_std(config), key=key)


TABLES: dict[str, dict[str, Callable[..., Any]]] = {
    "block": {
        "pre": _residual_block(PreNorm, 1),
        "post": _residual_block(PostNorm, 1),
        "sandwich": _residual_block(SandwichNorm, 2),
        "parallel": _parallel_block,
    },
    "attention": {"full": _full_attention, "sliding": _sliding_attention},
    "mlp": {
        **{name: _mlp(MLP, activation) for name, activation in ACTIVATIONS.items()},
        "swiglu": _mlp(GatedMLP, silu),
        "geglu": _mlp(GatedMLP, gelu),
        "moe": _moe,
    },
    "norm": {
        "rms": _rms_norm,
        "layer": _layer_norm,
        "dyt": lambda config, *, key: DyT(config.d_model, bias=config.bias),
    },
    "positions": {
        "rotary": _rotary,
        "learned": _learned,
        "sinusoidal": lambda config, *, causal=True, key: Sinusoidal(),
        "alibi": lambda config, *, causal=True, key: ALiBi(config.n_heads),
        "relative": _relative,
        "none": lambda config, *, causal=True, key: NoPositions(),
    },
}


def make_part(field: str, config: ModelConfig, key: PRNGKeyArray, **more: Any) -> Any:
    """The part that `config.FIELD` describes. `more` are further arguments.

    **Raises:** `UserError` if there is no such part, it does not have the options given, or it is
    for an encoder and does not take `causal`.
    """
    make, options = find_part(field, config)
    if "causal" not in inspect.signature(make).parameters:
        causal = more.pop("causal", True)
        if not causal:
            raise UserError(
                f"{getattr(config, field)} must take causal=, to serve in an encoder, where every "
                "token sees every other: causal is False there, and True in a decoder."
            )
    return make(config, **options, **more, key=key)


def find_part(field: str, config: ModelConfig) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that makes the part `config.FIELD`, and the part's own options.

    **Raises:** `UserError` if there is no such part, or it does not take the options given.
    """
    value = getattr(config, field)
    name, given = split_options(value)
    make = TABLES[field].get(name) or CUSTOM.get(name)
    if make is None:
        raise UserError(f"{name} has not been loaded: see gptlite.load_custom.")
    return make, parse_options(f"model.{field} {name}", make, given)


def parse_options(name: str, make: Callable[..., Any], given: Mapping[str, str]) -> dict[str, Any]:
    """The options of a block, in the types that the annotations of `make` name.

    **Raises:** `UserError`, with `name`, if `make` does not take an option or its value.
    """
    if not given:
        return {}
    known = {
        option: parameter
        for option, parameter in inspect.signature(make).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and option not in ("key", "causal")
    }
    options = {}
    for option, text in given.items():
        if option not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise UserError(f"{name} has no option {option}: {has}.")
        options[option] = _parse(f"{option} in {name}", text, known[option].annotation)
    return options


def _parse(name: str, text: str, kind: Any) -> Any:
    """An option's value, in the annotated type.

    **Raises:** `UserError` if `text` is no such value.
    """
    # With `from __future__ import annotations`, an annotation is its text.
    kind = {"bool": bool, "int": int, "float": float, "str": str}.get(kind, kind)
    plain = get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
    if plain not in (bool, int, float, str):
        raise UserError(f"{name} must be annotated as bool, int, float or str, to be set by name.")
    value: Any = text
    try:
        if plain is bool:
            value = {"true": True, "false": False}[text.lower()]
        elif plain in (int, float):
            value = plain(text)
    except (ValueError, KeyError):
        raise UserError(f"{name} must be {plain.__name__}, got {text!r}.") from None
    check_value(name, value, kind)
    return value


def embedding_std(config: ModelConfig) -> float:
    """The standard deviation of embeddings and learned positions."""
    if config.scale_embedding:
        return config.d_model**-0.5
    # A head that shares the embedding's matrix needs it small: logits start near 0.
    return 0.02 if config.init == "gpt2" or config.tied_head else 1.0


def init_stds(config: ModelConfig) -> tuple[float, float]:
    """Standard deviations of a block's matrices: those that read the residual stream, and those
    that write to it."""
    if config.init == "gpt2":
        # Radford et al., 2019, section 2.3: what adds to the residual stream starts smaller.
        return 0.02, 0.02 / math.sqrt(2 * config.n_layers)
    std = 1.0 / math.sqrt(config.d_model)
    # With sandwich, a norm follows: at zero input the gradient of RMSNorm is 1/sqrt(eps), about
    # 1,000.
    return std, std if config.block == "sandwich" else 0.0
