"""Every part of the package, alone, in all checks that apply to it. (Whole models: see
test_gpt.py.)"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest

from gptlite.nn import (
    MLP,
    Attention,
    DyT,
    GatedMLP,
    Heads,
    LayerNorm,
    MoE,
    RelativeBias,
    RMSNorm,
    Rotary,
    RotaryOptions,
)
from gptlite.nn.mlp import ACTIVATIONS
from gptlite.nn.variants.gated_attention import GatedAttention
from gptlite.research.check_block import check_block
from gptlite.research.laws import LAWS

D = 16
KEY = jax.random.key(0)


def heads(**options):
    return Heads(D, 4, std=D**-0.5, output_std=0.0, key=KEY, **options)


ATTENTION = {
    "rotary": lambda: Attention(heads(qkv_bias=True, output_bias=True), Rotary()),
    "grouped": lambda: Attention(
        heads(n_kv_heads=2, d_head=6, qk_norm=True, qk_gain=True),
        Rotary(RotaryOptions(theta=100.0)),
    ),
    "relative-sliding": lambda: Attention(
        heads(), score_bias=RelativeBias(4, buckets=4, max_distance=6, key=KEY), window=3
    ),
    "gated, some channels turn": lambda: GatedAttention.of(
        Attention(heads(), Rotary(RotaryOptions(share=0.5))), std=0.3, key=KEY
    ),
}
STD = {"std": 0.3, "down_std": 0.0, "key": KEY}
LAYERS: dict[str, Callable[[], Any]] = {
    **{
        name: functools.partial(MLP, D, 24, activation=act, bias=True, **STD)
        for name, act in ACTIVATIONS.items()
    },
    "swiglu": lambda: GatedMLP(D, 24, bias=True, **STD),
    "geglu": lambda: GatedMLP(D, 24, activation=jax.nn.gelu, **STD),
    "moe": lambda: MoE(D, 8, n_experts=4, experts_per_token=2, **STD),
    "rms": lambda: RMSNorm(D),
    "layer": lambda: LayerNorm(D),
    "dyt": lambda: DyT(D),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    report = check_block(ATTENTION[name](), d_model=D)
    left_out = [name for name in report.left_out if not name.startswith("more than")]
    assert left_out == ["sees", "documents", "reference"]
    assert set(report.does_not_apply) == {
        "build",
        "bidirectional",
        "dropout",
        "auxiliary",
        "transfer",
    }


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    """Activations differ in nothing but their gradients and their numbers."""
    few = ["gradients", "bfloat16", "extremes"]
    checks = few if name in ACTIVATIONS and name != "relu2" else list(LAWS)
    report = check_block(LAYERS[name](), d_model=D, checks=checks)
    silent = {"build", "bidirectional", "padding", "documents", "dropout", "weights", "scan"}
    silent.add("transfer")
    silent |= set() if name == "moe" else {"auxiliary"}
    assert set(report.does_not_apply) == silent & set(checks)
    left_out = {name for name in report.left_out if not name.startswith("more than")}
    assert left_out == {"sees", "reference"} & set(checks)
