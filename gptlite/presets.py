"""Named configurations: `gptlite train PRESET`."""

import dataclasses

from gptlite.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig

# nanoGPT's hyper-parameters for a small AdamW run. Its learning rate falls to a tenth.
_NANOGPT_OPTIMIZER = OptimizerConfig(
    name="adamw",
    learning_rate=1e-3,
    schedule="cosine",
    warmup_fraction=0.05,
    final_fraction=0.1,
    beta1=0.9,
    beta2=0.99,
    weight_decay=0.1,
    clip_norm=1.0,
)

# GPT-2's block (Radford et al., 2019): learned positions, pre-LayerNorm, GELU, biases, tied head.
GPT2_SMALL = ModelConfig(
    n_layers=12,
    n_heads=12,
    d_model=768,
    context_length=1024,
    norm="layer",
    mlp="gelu",
    positions="learned",
    embed_previous=0,
    qk_norm=False,
    bias=True,
    tied_head=True,
    init="gpt2",
)


_S = dataclasses.replace(
    GPT2_SMALL, n_layers=4, n_heads=4, d_model=128, context_length=64, bias=False
)
_M = dataclasses.replace(_S, n_layers=6, n_heads=6, d_model=384, context_length=256)

PRESETS: dict[str, tuple[str, Config]] = {
    "quick": (
        "the default preset: a minute or two on two CPU cores (for export, see portable)",
        Config(model=ModelConfig(d_ff=256)),
    ),
    "laptop": (
        "twice as deep, for a few minutes (for export, see portable)",
        Config(
            model=ModelConfig(n_layers=6, d_ff=256),
            training=TrainingConfig(steps=1800, eval_every=600),
        ),
    ),
    "portable": (
        "as good as laptop, with blocks that other libraries have (see docs/hugging-face.md)",
        Config(
            model=ModelConfig(n_layers=6, mlp="swiglu", d_ff=176, embed_previous=0),
            training=TrainingConfig(steps=1800, eval_every=600),
        ),
    ),
    "gpu": (
        "10.7 M parameters with the blocks of quick, for one data-centre GPU",
        Config(
            model=ModelConfig(n_layers=6, n_heads=6, d_model=384, context_length=256, dropout=0.4),
            optimizer=OptimizerConfig(weight_decay=1.0),
            training=TrainingConfig(steps=2000, batch_size=64, eval_every=250),
        ),
    ),
    "s": (
        "nanoGPT's CPU recipe: its hyper-parameters, GPT-2's block, 0.80 M parameters",
        Config(
            model=_S,
            optimizer=_NANOGPT_OPTIMIZER,
            training=TrainingConfig(
                steps=2000, batch_size=12, compute_dtype="float32", eval_every=250
            ),
        ),
    ),
    "m": (
        "nanoGPT's GPU recipe for characters: GPT-2's block, 10.7 M parameters",
        Config(
            model=dataclasses.replace(_M, dropout=0.2, attention_dropout=0.2),
            optimizer=dataclasses.replace(_NANOGPT_OPTIMIZER, warmup_fraction=0.02),
            training=TrainingConfig(
                steps=5000, batch_size=64, compute_dtype="float32", eval_every=250
            ),
        ),
    ),
    "gpt2": (
        "GPT-2 small, 124 M parameters, on GPT-2's own tokens",
        Config(
            data=DataConfig(tokenizer="tiktoken:gpt2"),
            model=GPT2_SMALL,
            optimizer=dataclasses.replace(_NANOGPT_OPTIMIZER, learning_rate=6e-4, beta2=0.95),
            training=TrainingConfig(steps=10000, batch_size=32, accumulation=4),
        ),
    ),
}
