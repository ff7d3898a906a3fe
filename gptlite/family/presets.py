"""The config of the first transformer."""

from gptlite.config import ModelConfig

# The base model of Vaswani et al., 2017 (table 3), for `Seq2Seq` and `Encoder`: post-LayerNorm,
# ReLU, sinusoidal positions on scaled embeddings, which are also the head. (In the paper, attention
# has no biases.)
VASWANI = ModelConfig(
    n_layers=6,
    n_heads=8,
    d_model=512,
    context_length=512,
    block="post",
    norm="layer",
    mlp="relu",
    positions="sinusoidal",
    scale_embedding=True,
    embed_previous=0,
    qk_norm=False,
    bias=True,
    tied_head=True,
    dropout=0.1,
    attention_dropout=0.1,
)
