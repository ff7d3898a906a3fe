"""Layers that keep a state in place of keys and values, by their names in a config."""

from gptlite.nn.variants.delta import DeltaNet, GatedDeltaNet, KimiDeltaAttention
from gptlite.nn.variants.linear_attention import (
    GatedLinearAttention,
    LinearAttention,
    Retention,
)
from gptlite.nn.variants.mamba2 import Mamba2
from gptlite.nn.variants.rwkv7 import RWKV7

STATES = {
    "linear": LinearAttention,
    "retention": Retention,
    "gla": GatedLinearAttention,
    "mamba2": Mamba2,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "rwkv7": RWKV7,
}
