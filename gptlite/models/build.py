"""From a config to the blocks that it describes.

Each table holds the package's blocks by the name that a config has for them. An entry is called as
`make(config, key=key, ...)`. If it has an argument `options`, its annotation is a dataclass of the
block's own options, which follow the name in a config, as in `moe:n_experts=8`. Custom blocks are
called in the same way, with their options as keyword arguments.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Int, PRNGKeyArray

from gptlite.config import ModelConfig
from gptlite.errors import UserError, require
from gptlite.machine.names import CustomBlock, parse_options, split_options
from gptlite.nn.attention import Attention, AttentionOptions, Heads, SlidingOptions
from gptlite.nn.block import Block, PostNorm, PreNorm
from gptlite.nn.mlp import ACTIVATIONS, MLP, GatedMLP, gelu, silu
from gptlite.nn.norms import LayerNorm, LayerNormOptions, RMSNorm, RMSNormOptions
from gptlite.nn.positions import Learned, NoPositions, Rotary
from gptlite.nn.variants.blocks import ParallelBlock, SandwichNorm
from gptlite.nn.variants.distances import ALiBi, RelativeBias
from gptlite.nn.variants.dyt import DyT
from gptlite.nn.variants.gated_attention import GatedAttention
from gptlite.nn.variants.moe import MoE
from gptlite.nn.variants.rotary_options import RotaryOptions
from gptlite.nn.variants.sinusoidal import Sinusoidal
from gptlite.nn.variants.states import STATES


def _residual_block(residual: Any, n_norms: int) -> Callable[..., Any]:
    def make(config, *, causal=True, layer=None, key):
        attention_key, mlp_key, _, *norm_keys = jax.random.split(key, 3 + 2 * n_norms)

        def make_residual(i):
            keys = norm_keys[i * n_norms : (i + 1) * n_norms]
            return residual(*[make_part("norm", config, key, layer=layer) for key in keys])

        return Block(
            attention=make_part("attention", config, attention_key, causal=causal, layer=layer),
            attention_residual=make_residual(0),
            mlp=make_part("mlp", config, mlp_key, layer=layer),
            mlp_residual=make_residual(1),
            dropout=config.dropout,
        )

    return make


def _parallel_block(config, *, causal=True, layer=None, key):
    attention_key, mlp_key, norm_key = jax.random.split(key, 3)
    return ParallelBlock(
        attention=make_part("attention", config, attention_key, causal=causal, layer=layer),
        mlp=make_part("mlp", config, mlp_key, layer=layer),
        norm=make_part("norm", config, norm_key, layer=layer),
        dropout=config.dropout,
    )


def _full_attention(config, options: AttentionOptions, *, causal=True, key):
    right = config.qk_norm or not options.qk_gain
    require(right, "The option qk_gain of model.attention needs --model.qk-norm.")
    heads_key, positions_key = jax.random.split(key)
    positions = make_positions(config, positions_key, added=False, causal=causal)
    if options.theta is not None:
        is_rotary = isinstance(positions, Rotary)
        require(is_rotary, "The option theta of model.attention needs --model.positions rotary.")
        positions = Rotary(dataclasses.replace(positions.options, theta=options.theta))
    return Attention(
        make_heads(config, heads_key, options),
        positions=positions if isinstance(positions, Rotary) else NoPositions(),
        score_bias=positions if isinstance(positions, ALiBi | RelativeBias) else None,
        causal=causal,
        dropout=config.attention_dropout,
    )


def _sliding_attention(config, options: SlidingOptions, *, causal=True, key):
    require(causal, "An encoder sees all tokens: model.attention must be full, got sliding.")
    return dataclasses.replace(_full_attention(config, options, key=key), window=options.window)


def _gated_attention(config, options: AttentionOptions, *, causal=True, key):
    attention = _full_attention(config, options, causal=causal, key=key)
    gate_key = jax.random.fold_in(key, 2)
    return GatedAttention.of(attention, std=config.init_stds[0], key=gate_key)


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
    config: ModelConfig, key: PRNGKeyArray, options: AttentionOptions | None = None
) -> Heads:
    """The matrices of attention as `config` describes them."""
    std, output_std = config.init_stds
    options = AttentionOptions() if options is None else options
    return Heads(
        config.d_model,
        config.n_heads,
        n_kv_heads=config.n_kv_heads,
        d_head=config.head_size,
        qk_norm=config.qk_norm,
        qk_gain=options.qk_gain,
        qk_eps=options.qk_eps,
        std=std,
        output_std=output_std,
        qkv_bias=config.bias or options.qkv_bias,
        output_bias=config.bias or options.output_bias,
        key=key,
    )


def _mlp(kind: Any, activation: Callable) -> Callable[..., Any]:
    def make(config, *, key):
        std, down_std = config.init_stds
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


def _rotary(config, options: RotaryOptions, *, causal=True, key):
    options.width(config.d_head)  # raises, if the share does not fit
    return Rotary(options)


def _rms_norm(config, options: RMSNormOptions, *, key):
    return RMSNorm(config.d_model, eps=options.eps)


def _layer_norm(config, options: LayerNormOptions, *, key):
    return LayerNorm(config.d_model, bias=config.bias, eps=options.eps)


TABLES: dict[str, dict[str, Callable[..., Any]]] = {
    "block": {
        "pre": _residual_block(PreNorm, 1),
        "post": _residual_block(PostNorm, 1),
        "sandwich": _residual_block(SandwichNorm, 2),
        "parallel": _parallel_block,
    },
    "attention": {
        "full": _full_attention,
        "sliding": _sliding_attention,
        "gated": _gated_attention,
        **STATES,
    },
    "mlp": {
        **{name: _mlp(MLP, activation) for name, activation in ACTIVATIONS.items()},
        "swiglu": _mlp(GatedMLP, silu),
        "geglu": _mlp(GatedMLP, gelu),
        "moe": MoE.from_config,
    },
    "norm": {
        "rms": _rms_norm,
        "layer": _layer_norm,
        "dyt": lambda config, *, key: DyT(config.d_model, bias=config.bias),
    },
    "positions": {
        "rotary": _rotary,
        "learned": lambda config, *, causal=True, key: Learned(
            config.context_length, config.d_model, std=embedding_std(config), key=key
        ),
        "sinusoidal": lambda config, *, causal=True, key: Sinusoidal(),
        "alibi": lambda config, *, causal=True, key: ALiBi(config.n_heads),
        "relative": RelativeBias.from_config,
        "none": lambda config, *, causal=True, key: NoPositions(),
    },
}


def make_part(
    field: str,
    config: ModelConfig,
    key: PRNGKeyArray,
    *,
    causal: bool = True,
    layer: Int[Array, ""] | None = None,
) -> Any:
    """The part that `config.FIELD` describes, such as a whole `block`. An attention or a block
    without `causal` is an encoder's. A part that takes `layer` gets the number of its layer, from
    0: an array, because one call under `vmap` makes all layers.

    **Raises:** `UserError` if there is no such part, it does not have the options given, it makes
    itself, or it is for an encoder and does not take `causal`.
    """
    make, options = find_part(field, config)
    taken = inspect.signature(make).parameters
    require(
        causal or "causal" in taken,
        f"{getattr(config, field)} is not for an encoder, where every token sees every other: what "
        "is for one takes causal=, which is False there, and True in a decoder.",
    )
    facts = {"causal": causal, "layer": layer}
    facts = {name: fact for name, fact in facts.items() if name in taken and fact is not None}
    try:
        return make(config, **options, **facts, key=key)
    except RecursionError as error:
        raise UserError(
            f"model.{field} {getattr(config, field)} makes itself, without an end: make_part there "
            f"needs a config with another {field}, as dataclasses.replace makes it."
        ) from error


make_block = functools.partial(make_part, "block")


def find_part(field: str, config: ModelConfig) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that makes the part `config.FIELD`, and the arguments that are its own options.

    **Raises:** `UserError` if there is no such part, or it does not take the options given.
    """
    value = getattr(config, field)
    name, texts = split_options(value)
    label = f"model.{field} {name}"
    if isinstance(value, CustomBlock):
        return value.block, parse_options(label, value.block, texts)
    make = TABLES[field].get(name)
    if make is None:
        raise UserError(
            f"model.{field} must be one of {', '.join(TABLES[field])}, or a custom block that has "
            f"been loaded (see gptlite.load_custom), got {name}."
        )
    kind = inspect.signature(make).parameters.get("options")
    if kind is None:
        return make, parse_options(label, make, texts)
    return make, {"options": kind.annotation(**parse_options(label, kind.annotation, texts))}


def embedding_std(config: ModelConfig) -> float:
    """The standard deviation of embeddings and learned positions."""
    if config.scale_embedding:
        return config.d_model**-0.5
    # A head that shares the embedding's matrix needs it small: logits start near 0.
    return 0.02 if config.init == "gpt2" or config.tied_head else 1.0
