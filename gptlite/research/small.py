"""The config of blocks that are checked."""

from gptlite.config import ModelConfig

# Heads that share keys, and a context that is longer than bfloat16 counts.
SMALL = ModelConfig(n_layers=2, n_heads=4, n_kv_heads=2, d_model=16, context_length=1032)
