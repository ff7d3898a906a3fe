"""The parts that all models are built from."""

from gptlite.nn.attention import Attention, Heads
from gptlite.nn.block import Block, ParallelBlock, PostNorm, PreNorm, SandwichNorm
from gptlite.nn.cache import Cache, KVCache
from gptlite.nn.context import WHOLE_SEQUENCE, Context
from gptlite.nn.dot_product import attend, causal_mask
from gptlite.nn.embedding import Embedding
from gptlite.nn.linear import Linear
from gptlite.nn.mlp import MLP, GatedMLP, MoE
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
from gptlite.nn.stack import Layers, Stack
