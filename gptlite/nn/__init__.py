"""The parts that all models are built from."""

from gptlite.nn.attention import Attention, Heads
from gptlite.nn.block import Block, PostNorm, PreNorm
from gptlite.nn.cache import Cache, KVCache
from gptlite.nn.context import WHOLE_SEQUENCE, Context
from gptlite.nn.dot_product import attend, causal_mask
from gptlite.nn.embedding import Embedding
from gptlite.nn.linear import Linear
from gptlite.nn.mlp import MLP, GatedMLP
from gptlite.nn.norms import LayerNorm, RMSNorm
from gptlite.nn.positions import Learned, NoPositions, Rotary
from gptlite.nn.stack import Layers, Stack
from gptlite.nn.variants.blocks import ParallelBlock, SandwichNorm
from gptlite.nn.variants.distances import ALiBi, RelativeBias
from gptlite.nn.variants.dyt import DyT
from gptlite.nn.variants.matrix_state import HeadsState, MatrixState, ShortConvolution, Tokens
from gptlite.nn.variants.moe import MoE
from gptlite.nn.variants.recurrence import Recurrence
from gptlite.nn.variants.rotary_options import RotaryOptions
from gptlite.nn.variants.sinusoidal import Sinusoidal
