"""The blocks, each from `[*batch, seq, d_model]` to the same shape, knowing no neighbour."""

from gptlite.nn.attention import Attention, CrossAttention, Memory, ValueResidual
from gptlite.nn.block import Block, ParallelBlock, PostNormBlock, SandwichBlock
from gptlite.nn.cache import Cache, LayerCache
from gptlite.nn.decoder_block import DecoderBlock, DecoderCache, PostNormDecoderBlock
from gptlite.nn.dot_product import attend, attention_weights
from gptlite.nn.embedding import Embedding
from gptlite.nn.linear import Linear
from gptlite.nn.masks import Bidirectional, Causal, SlidingWindow
from gptlite.nn.mlp import MLP, GatedMLP, MoE
from gptlite.nn.norms import DyT, LayerNorm, RMSNorm
from gptlite.nn.positions import ALiBi, Learned, NoPositions, RelativeBias, Rotary, Sinusoidal
from gptlite.nn.softcap import SoftCap
from gptlite.nn.stack import Layers, Stack

__all__ = [
    "MLP",
    "ALiBi",
    "Attention",
    "Bidirectional",
    "Block",
    "Cache",
    "Causal",
    "CrossAttention",
    "DecoderBlock",
    "DecoderCache",
    "DyT",
    "Embedding",
    "GatedMLP",
    "LayerCache",
    "LayerNorm",
    "Layers",
    "Learned",
    "Linear",
    "Memory",
    "MoE",
    "NoPositions",
    "ParallelBlock",
    "PostNormBlock",
    "PostNormDecoderBlock",
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
    "attention_weights",
]
