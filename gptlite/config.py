"""Every field of a run's configuration, once. The docstring below a field is its line in `--help`.

This module imports nothing heavy, so that `--help` answers at once.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from gptlite.errors import require
from gptlite.machine.fields import MAX_INT32, Between, Free, check_fields
from gptlite.machine.names import (
    CUSTOM_FIELDS,
    BlockChoice,
    BlockNames,
    CustomBlock,
    EveryNth,
    check_every,
    custom_name,
    parse_bpe,
    parse_lora,
    split_options,
)

STATES = ("linear", "retention", "gla", "mamba2", "deltanet", "gated_deltanet", "kda", "rwkv7")
ATTENTIONS = ("full", "sliding", "gated", *STATES)
MLPS = ("gelu", "silu", "relu", "relu2", "tanh", "sigmoid", "identity", "swiglu", "geglu", "moe")


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes tokens."""

    corpus: Annotated[str, Free("resume", "weights", "comparison")] = "auto"
    """`shakespeare` (TinyShakespeare), `pydoc` (Python's own documentation, needs no network),
    a UTF-8 text file, a folder of .txt files, or `hf:NAME[:CONFIG][:SPLIT][:COLUMN]` (a dataset on
    Hugging Face's hub, or a folder, a file or an address with JSON lines, Parquet, CSV or text).
    `auto` is shakespeare, or pydoc if that cannot be downloaded."""

    tokenizer: Annotated[str, Free("comparison")] = "char"
    """`char` (the text's own characters), `byte` (UTF-8), `bpe:SIZE` (a byte-pair encoding that is
    trained on the text, e.g. `bpe:4096`), `tiktoken:NAME`, e.g. `tiktoken:gpt2`, or `hf:FOLDER` or
    `hf:NAME` (the tokenizer.json in a folder or of a model on the hub)."""

    max_tokens: Annotated[int | None, Between(2, MAX_INT32), Free("weights")] = None
    """Train on the first so many tokens, and read no more of a dataset. None: on all."""

    validation_tokens: Annotated[int, Between(2, MAX_INT32), Free("weights")] = 1_000_000
    """Validate on at most this many tokens, from the start of the last 10 % of the text."""

    def __post_init__(self):
        check_fields("data.", self)
        if self.tokenizer.startswith("bpe"):
            parse_bpe(self.tokenizer)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the network and which blocks it is built from.

    A block's own options follow its name: --model.mlp moe:n_experts=8:balance_loss=0.1. In place of
    a name, FILE.py:CLASS takes a custom block."""

    n_layers: Annotated[int, Between(1, 256)] = 3
    """Blocks in the stack."""

    n_heads: Annotated[int, Between(1, 10_000)] = 2
    """Attention heads; must divide d_model, unless head_size is given."""

    n_kv_heads: Annotated[int | None, Between(1)] = None
    """Heads of keys and values; must divide n_heads. Fewer than n_heads: grouped-query attention,
    1: multi-query attention. None: n_heads."""

    head_size: Annotated[int | None, Between(1, 1_000_000)] = None
    """Width of an attention head. None: d_model / n_heads."""

    d_model: Annotated[int, Between(1, 1_000_000)] = 128
    """Width of the residual stream."""

    d_ff: Annotated[int | None, Between(1, 10_000_000)] = None
    """Width inside the MLP. None: 4 d_model, or for swiglu and geglu, which have a third matrix,
    8/3 d_model rounded up to a multiple of 8. With moe: the sum over a token's experts."""

    context_length: Annotated[int, Between(1, 10_000_000), Free("weights")] = 256
    """Maximum number of tokens that the model attends to, in training and in generation."""

    block: Annotated[BlockChoice, BlockNames(("pre", "post", "sandwich", "parallel"))] = "pre"
    """Where the norms are: before attention and MLP (pre), after the residual additions (post), on
    both sides (sandwich), or one before attention and MLP in parallel (parallel)."""

    norm: Annotated[BlockChoice, BlockNames(("rms", "layer", "dyt"))] = "rms"
    """RMSNorm (rms, with the option eps=1e-6), LayerNorm (layer, with the option eps=1e-5) or DyT
    (dyt), in the blocks and before the head."""

    attention: Annotated[BlockChoice, BlockNames(ATTENTIONS)] = "full"
    """What a token attends to: itself and all earlier tokens (full; gated, with a gate of what
    it reads), or the last 64 including itself (sliding, with the option window). Options of these:
    qkv_bias=true and output_bias=true add biases to these matrices alone; qk_gain=true adds trained
    gains to qk_norm, and qk_eps=1e-6 is its epsilon; theta is that of rotary positions in these
    layers (None: that of model.positions). Or a state in place of keys and values (docs/blocks.md):
    linear, retention, gla, deltanet, gated_deltanet, kda, mamba2 or rwkv7. Their options: conv=4
    (delta rules and mamba2), negative=true (delta rules), state=64 and expand=2 (mamba2), rank=32
    (rwkv7), heads, key_heads, key_size and value_size (gated_deltanet)."""

    attention_every: Annotated[str | None, EveryNth(ATTENTIONS)] = None
    """Another attention in every Nth layer: with 4:full, in layers 4, 8, 12 and so on. Its own
    options follow its name, as in 4:sliding:window=128. None: all layers have the same."""

    mlp: Annotated[BlockChoice, BlockNames(MLPS)] = "relu2"
    """The MLP's activation: gelu, silu, relu, relu2, tanh, sigmoid or identity; swiglu and geglu
    add a gate; moe is a mixture of relu2 experts (options n_experts=4, experts_per_token=2,
    balance_loss=0.01: the weight of the loss that keeps the experts equally busy)."""

    positions: Annotated[
        str,
        BlockNames(("rotary", "learned", "sinusoidal", "alibi", "relative", "none"), custom=False),
    ] = "rotary"
    """How the model knows the positions of tokens: rotary rotates queries and keys (options
    theta=10000, share=1 of the channels and, for Llama 3.1's scaling, factor=1, low_frequency=1,
    high_frequency=4, original_context=8192); learned and sinusoidal add to the embeddings; alibi
    and relative (options buckets=32, max_distance=128) add to attention's scores by distance;
    none."""

    embed_previous: Annotated[int, Between(0, 64)] = 2
    """How many earlier tokens are added to each token's embedding, each from a table of its own. A
    small model then needs no layer that attends to the previous token."""

    scale_embedding: bool = False
    """Multiply embeddings by sqrt(d_model); the tables start with standard deviation
    1 / sqrt(d_model) (Vaswani et al., 2017, section 3.4)."""

    qk_norm: bool = True
    """RMS-normalise queries and keys before their product."""

    separate_documents: Annotated[bool, Free("weights")] = False
    """Each token sees only its own document, whose positions begin at 0 and which begins with the
    tokenizer's end-of-text token (see docs/training.md)."""

    logit_cap: Annotated[float | None, Between(0.0, above=True)] = None
    """Bound the logits smoothly to this size. None: no bound."""

    bias: bool = False
    """Biases in linear layers (not in experts) and LayerNorms."""

    tied_head: bool = False
    """Use the embedding matrix as the output head too."""

    dropout: Annotated[float, Between(0.0, 0.99), Free("weights")] = 0.0
    """Share of activations dropped in training: after the embedding and in what attention and MLP
    add to the residual stream."""

    attention_dropout: Annotated[float, Between(0.0, 0.99), Free("weights")] = 0.0
    """Share of attention weights dropped in training. Above 0, no fused attention is used."""

    init: Literal["zero", "gpt2"] = "zero"
    """zero: standard deviation 1 / sqrt(d_model); matrices that write to the residual stream
    (except with block sandwich) and the head start at zero. gpt2: standard deviation 0.02, residual
    writers / sqrt(2 n_layers)."""

    stack: Annotated[Literal["unrolled", "scan"], Free("weights")] = "unrolled"
    """Train the layers one by one (fastest to run on a CPU) or by lax.scan (fastest to compile).
    The result is the same."""

    remat: Annotated[Literal["none", "attention", "block"], Free("resume", "weights")] = "none"
    """What the gradient computes once more, to save memory in training: the inside of each
    attention, or of each block. The layers then run by lax.scan. The result is the same."""

    lora: Annotated[str | None, Free("weights")] = None
    """Low-rank adapters beside the matrices of a model that has been trained (--init-from), e.g. 8:
    their rank (Hu et al., 2021). All else stays as it is. Options: alpha (default: twice the rank),
    whose share of the rank scales the adapters; matrices (default:
    query+key+value+output+up+gate+down, as far as there are such). None: all is trained."""

    def __post_init__(self):
        for name in CUSTOM_FIELDS:
            if isinstance(block := getattr(self, name), type):  # in Python, the class itself
                object.__setattr__(self, name, CustomBlock(custom_name(block), block))
        check_fields("model.", self)
        if self.lora is not None:
            parse_lora(self.lora)
        require(
            self.head_size is not None or self.d_model % self.n_heads == 0,
            "Without model.head_size, model.d_model must be a multiple of model.n_heads, got "
            f"d_model {self.d_model} and n_heads {self.n_heads}.",
        )
        require(
            self.n_kv_heads is None or self.n_heads % self.n_kv_heads == 0,
            f"model.n_heads must be a multiple of model.n_kv_heads, got n_heads {self.n_heads} "
            f"and n_kv_heads {self.n_kv_heads}.",
        )
        check_every(self.attention_every, self.n_layers)
        positions, _ = split_options(self.positions)
        rotates = split_options(self.attention)[0] not in STATES or self.attention_every is not None
        require(
            positions != "rotary" or self.d_head % 2 == 0 or not rotates,
            "Rotary positions rotate pairs of channels, so the width of a head (model.head_size, "
            f"or else d_model / n_heads) must be even, got {self.d_head}.",
        )
        require(
            positions != "sinusoidal" or self.d_model % 2 == 0,
            "Sinusoidal positions come in pairs of sine and cosine, so d_model must be even, got "
            f"{self.d_model}.",
        )

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads if self.head_size is None else self.head_size

    @property
    def d_hidden(self) -> int:
        """Width inside the MLP, with the default filled in."""
        if self.d_ff is not None:
            return self.d_ff
        gated = self.mlp in ("swiglu", "geglu")
        return 8 * math.ceil(self.d_model / 3) if gated else 4 * self.d_model

    @property
    def init_stds(self) -> tuple[float, float]:
        """Standard deviations of a block's matrices: those that read the residual stream, and those
        that write to it."""
        if self.init == "gpt2":
            # Radford et al., 2019, section 2.3: what adds to the residual stream starts smaller.
            return 0.02, 0.02 / math.sqrt(2 * self.n_layers)
        std = 1.0 / math.sqrt(self.d_model)
        # With sandwich, a norm follows, whose gradient at zero is 1/sqrt(eps), about 1,000.
        return std, std if self.block == "sandwich" else 0.0


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become updates."""

    name: Literal["muon", "adamw"] = "muon"
    """muon: orthogonalised momentum for the matrices inside the blocks, Adam for the rest.
    adamw: Adam for everything."""

    learning_rate: Annotated[float, Between(0.0)] = 0.02
    """Peak learning rate (with muon: that of the matrices; for those that write to the residual
    stream, times 3 / n_layers, so that a rate is as good at any depth)."""

    adam_learning_rate: Annotated[float, Between(0.0)] = 0.01
    """With muon: peak learning rate of embedding, head, gains and biases (for the head, times 128 /
    d_model, so that a rate is as good at any width)."""

    schedule: Literal["cosine", "linear", "constant", "wsd", "noam"] = "wsd"
    """After warm-up: cosine or linear decay to the end; constant; wsd (constant, then linear
    decay); noam (1 / sqrt(step); for the peak of Vaswani et al., 2017, set the learning rate to 1 /
    sqrt(d_model * warm-up steps))."""

    warmup_fraction: Annotated[float, Between(0.0, 1.0)] = 0.03
    """Share of all steps over which the learning rate rises to its peak."""

    decay_fraction: Annotated[float, Between(0.0, 1.0)] = 0.5
    """With wsd: share of all steps, at the end, over which the learning rate falls."""

    final_fraction: Annotated[float, Between(0.0, 1.0)] = 0.0
    """With cosine, linear and wsd: the learning rate of the last step as a share of the peak. With
    0, it would be 0 after the last step."""

    beta1: Annotated[float, Between(0.0, 0.999999)] = 0.9
    """Adam's decay of the mean of gradients (muon's own momentum is 0.95)."""

    beta2: Annotated[float, Between(0.0, 0.999999)] = 0.95
    """Adam's decay of the mean of squared gradients."""

    weight_decay: Annotated[float, Between(0.0)] = 0.0
    """Decoupled weight decay, times the learning rate, on matrices and embeddings."""

    clip_norm: Annotated[float | None, Between(0.0, above=True)] = None
    """Scale the gradient down to this global norm when it is larger. None: never."""

    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format in which the optimizer keeps its means between steps. bfloat16 halves their
    memory; beta2 may then be at most 0.99, because a smaller change would be rounded away."""

    def __post_init__(self):
        check_fields("optimizer.", self)
        require(
            self.state_dtype == "float32" or self.beta2 <= 0.99,
            f"With optimizer.state_dtype bfloat16, optimizer.beta2 must be at most 0.99, got "
            f"{self.beta2}.",
        )
        require(
            self.schedule != "wsd" or self.warmup_fraction + self.decay_fraction <= 1.0,
            "optimizer.warmup_fraction and optimizer.decay_fraction must add up to at most 1, got "
            f"{self.warmup_fraction} and {self.decay_fraction}.",
        )


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, in what portions, and how often to evaluate and save."""

    steps: Annotated[int, Between(1, MAX_INT32), Free("resume")] = 1200
    """Optimizer steps."""

    batch_size: Annotated[int, Between(1, MAX_INT32)] = 8
    """Windows of context_length tokens in one step."""

    accumulation: Annotated[int | None, Between(1, MAX_INT32)] = None
    """Compute a step's gradient in this many equal parts, one after the other. Less memory, same
    result. Must divide batch_size. None: on a CPU, parts of about 1,000 tokens a device, which its
    caches hold; on other devices 1."""

    label_smoothing: Annotated[float, Between(0.0, 0.99)] = 0.0
    """Share of the target's probability spread over the whole vocabulary (training only)."""

    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of activations and matrix products; parameters, norms, softmax, loss and
    optimizer stay in float32, and so do evaluation and sampling. auto: bfloat16 where the device
    is fast in it (a CPU with AMX, or AMD's with AVX512-BF16, a TPU, most GPUs), else float32, which
    is faster there, as for modules without a Stack. The run's config says which one it is."""

    cpu_devices: Annotated[int, Between(1, 1024), Free("resume", "comparison")] = 2
    """Without a GPU: how many devices training makes of the CPU, each with its own rows of a batch
    (fewer if they could not share it evenly). Two keep two cores busier than one that spreads
    each operation over both. The environment variable JAX_NUM_CPU_DEVICES overrides this."""

    log_every: Annotated[int, Between(1, MAX_INT32), Free("resume", "comparison")] = 20
    """Write a line of metrics after this many steps. These steps run as one compiled call if they
    take at most two seconds."""

    eval_every: Annotated[int, Between(1, MAX_INT32), Free("resume")] = 400
    """Evaluate, and print a sample, after this many steps and at the end."""

    sample_tokens: Annotated[int, Between(0, 100_000), Free("resume", "comparison")] = 128
    """Tokens of the sample at each evaluation; 0 for none."""

    save_seconds: Annotated[float, Between(0.0), Free("resume", "comparison")] = 300.0
    """Save a checkpoint when the last one is this old, in addition to each evaluation and stop.
    A killed run loses the steps since the last checkpoint."""

    keep: Annotated[int, Between(1, MAX_INT32), Free("resume", "comparison")] = 2
    """Keep this many of the newest checkpoints, and the best one."""

    freeze: str = ""
    """Parameters that stay as they are: patterns of their names, separated by commas, such as
    embedding.*,*.mlp.*. (The names are those of the arrays of a model; * stands for anything.)"""

    on_nonfinite: Annotated[Literal["stop", "skip"], Free("resume")] = "stop"
    """What to do when a loss or a gradient is not finite. stop: end the run, and save the batch.
    skip: skip that update, and count it."""

    seed: Annotated[int, Between(0, MAX_INT32), Free("comparison")] = 0
    """The run is a pure function of the config, this seed included, except for the order of sums,
    which depends on the devices."""

    init_from: Annotated[str | None, tyro.conf.Suppress] = None
    """From which run or model `--init-from` took the weights. None: from random numbers."""

    def __post_init__(self):
        check_fields("training.", self)
        require(
            self.batch_size % (self.accumulation or 1) == 0,
            "training.accumulation must divide training.batch_size, got accumulation "
            f"{self.accumulation} and batch_size {self.batch_size}.",
        )
        require(
            len(self.freeze) <= 1000 and (not self.freeze or all(self.frozen)),
            "training.freeze must be patterns of names, separated by commas, 1,000 characters in "
            f"all at most, got {self.freeze[:100]!r}.",
        )

    @property
    def frozen(self) -> list[str]:
        """The patterns of `freeze`."""
        return [pattern.strip() for pattern in self.freeze.split(",")] if self.freeze else []


@dataclass(frozen=True)
class MeshConfig:
    """How devices share the work: data times fsdp times tensor is their number. One of the three
    may be -1, what the others leave. The batch is divided among groups of `tensor` devices."""

    data: Annotated[int, Between(-1, MAX_INT32)] = -1
    """Groups of fsdp times tensor devices, each with all parameters, and rows of its own. To be
    given if another one of the three is -1."""

    fsdp: Annotated[int, Between(-1, MAX_INT32)] = 1
    """Devices that share a batch, each with a part of every matrix, gathered layer by layer. For
    models that do not fit on one device."""

    tensor: Annotated[int, Between(-1, MAX_INT32)] = 1
    """Devices that share the heads and the MLP's width. For models too large for fsdp alone."""

    def __post_init__(self):
        check_fields("mesh.", self)
        sizes = (self.data, self.fsdp, self.tensor)
        require(
            0 not in sizes and sizes.count(-1) <= 1,
            "mesh.data, mesh.fsdp and mesh.tensor are numbers of devices, and one of them may be "
            "-1 (mesh.data is, unless it is given), got "
            f"{self.data}, {self.fsdp} and {self.tensor}.",
        )


@dataclass(frozen=True)
class Config:
    """Everything that defines a run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: Annotated[OptimizerConfig, Free("weights")] = field(default_factory=OptimizerConfig)
    training: Annotated[TrainingConfig, Free("weights")] = field(default_factory=TrainingConfig)
    mesh: Annotated[MeshConfig, Free("resume", "weights", "comparison")] = field(
        default_factory=MeshConfig
    )

    def __post_init__(self):
        check_fields("", self)
        require(
            self.model.lora is None or self.training.init_from is not None,
            "model.lora adapts a model that has been trained: name it with --init-from.",
        )
        require(
            self.model.lora is None or not self.training.freeze,
            "With model.lora, all but the adapters stays as it is: leave training.freeze out.",
        )


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn. Each of these filters applies to what the one before it left."""

    temperature: Annotated[float, Between(0.0)] = 1.0
    """Divides the logits: below 1 sharpens the distribution, above 1 flattens it. 0: as --greedy.
    """

    top_k: Annotated[int | None, Between(0, MAX_INT32)] = None
    """Draw only from the k most probable tokens. 0: from all."""

    top_p: Annotated[float | None, Between(0.0, 1.0, above=True)] = None
    """Draw only from the fewest most probable tokens that together reach probability p."""

    min_p: Annotated[float | None, Between(0.0, 1.0)] = None
    """Draw only from tokens at least this share as probable as the most probable one."""

    greedy: bool = False
    """Always take the most probable token."""

    def __post_init__(self):
        check_fields("", self)
