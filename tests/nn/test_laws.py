"""Every part of the package, alone, against all the laws that hold for it. (Their orders: see
test_gpt.py.)"""

import functools

import jax
import pytest

from gptlite.nn import (
    MLP,
    Attention,
    DyT,
    GatedMLP,
    LayerNorm,
    MoE,
    RelativeBias,
    RMSNorm,
    Rotary,
    SlidingWindow,
    SoftCap,
)
from gptlite.nn.mlp import ACTIVATIONS
from gptlite.nn.positions import NoPositions
from gptlite.testing import LAWS, check_block

D = 16
KEY = jax.random.key(0)

attention = functools.partial(
    Attention, D, 4, positions=NoPositions(), std=D**-0.5, output_std=0.0, key=KEY
)
ATTENTION = {
    "rotary": attention(positions=Rotary(), bias=True),
    "grouped": attention(positions=Rotary(), n_kv_heads=2),
    "sliding": attention(positions=Rotary(), mask=SlidingWindow(3)),
    "relative": attention(
        score_bias=RelativeBias(4, buckets=4, farthest=6, key=KEY), mask=SlidingWindow(7)
    ),
}
LAYERS = {
    **{
        name: MLP(D, 24, activation=act, std=0.3, down_std=0.0, bias=True, key=KEY)
        for name, act in ACTIVATIONS.items()
    },
    "swiglu": GatedMLP(D, 24, std=0.3, down_std=0.0, bias=True, key=KEY),
    "geglu": GatedMLP(D, 24, activation=jax.nn.gelu, std=0.3, down_std=0.0, key=KEY),
    "moe": MoE(D, 8, n_experts=4, experts_per_token=2, std=0.3, down_std=0.0, key=KEY),
    "rms": RMSNorm(D),
    "layer": LayerNorm(D),
    "dyt": DyT(D),
    "soft-cap": SoftCap(2.0),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    assert set(check_block(ATTENTION[name]).laws) == set(LAWS) - {"both ways"}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    left_out = {"both ways", "scan"} | (set() if name == "moe" else {"padding"})
    assert set(check_block(LAYERS[name]).laws) == set(LAWS) - left_out
