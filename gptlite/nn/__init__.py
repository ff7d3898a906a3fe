"""The blocks, each from `[*batch, seq, d_model]` to the same shape, knowing no neighbour."""

from gptlite.nn.attention import Attention, attend
from gptlite.nn.block import Block
from gptlite.nn.cache import Cache, LayerCache
from gptlite.nn.embedding import Embedding
from gptlite.nn.linear import Linear
from gptlite.nn.mlp import MLP, SwiGLU
from gptlite.nn.norms import LayerNorm, RMSNorm
from gptlite.nn.positions import Learned, NoPositions, Rotary, Sinusoidal
from gptlite.nn.stack import Layers, Stack

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "Cache",
    "Embedding",
    "LayerCache",
    "LayerNorm",
    "Layers",
    "Learned",
    "Linear",
    "NoPositions",
    "RMSNorm",
    "Rotary",
    "Sinusoidal",
    "Stack",
    "SwiGLU",
    "attend",
]
