"""The blocks, each from `[*batch, seq, d_model]` to the same shape, knowing no neighbour."""

from gptlite.nn.attention import Attention, ValueResidual, attend
from gptlite.nn.block import Block, ParallelBlock, PostNormBlock, SandwichBlock
from gptlite.nn.cache import Cache, LayerCache
from gptlite.nn.embedding import Embedding
from gptlite.nn.linear import Linear
from gptlite.nn.masks import Causal, SlidingWindow
from gptlite.nn.mlp import MLP, GatedMLP, MoE
from gptlite.nn.norms import DyT, LayerNorm, RMSNorm
from gptlite.nn.positions import ALiBi, Learned, NoPositions, RelativeBias, Rotary, Sinusoidal
from gptlite.nn.softcap import SoftCap
from gptlite.nn.stack import Layers, Stack

__all__ = [
    "MLP",
    "ALiBi",
    "Attention",
    "Block",
    "Cache",
    "Causal",
    "DyT",
    "Embedding",
    "GatedMLP",
    "LayerCache",
    "LayerNorm",
    "Layers",
    "Learned",
    "Linear",
    "MoE",
    "NoPositions",
    "ParallelBlock",
    "PostNormBlock",
    "RMSNorm",
    "RelativeBias",
    "Rotary",
    "SandwichBlock",
    "Sinusoidal",
    "SlidingWindow",
    "SoftCap",
    "Stack",
    "ValueResidual",
    "attend",
]
