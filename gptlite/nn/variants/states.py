"""Layers that keep a state in place of keys and values, by their names in a config."""

from gptlite.nn.variants.delta import DeltaNet, GatedDeltaNet, KimiDeltaAttention
from gptlite.nn.variants.linear_attention import (
    GatedLinearAttention,
    LinearAttention,
    Retention,
)

STATES = {
    "linear": LinearAttention,
    "retention": Retention,
    "gla": GatedLinearAttention,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "kda": KimiDeltaAttention,
}
