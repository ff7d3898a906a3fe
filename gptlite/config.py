"""Every knob, once: the field's docstring below it is its line in `python train.py --help`.

This module imports nothing heavy, so that `--help` answers at once.
"""

import dataclasses
import inspect
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from gptlite.files import read_json, write_json


class UserError(ValueError):
    """Something the user asked for cannot be done. The message is a full sentence to show."""


def require(holds: bool, sentence: str) -> None:
    """Raise `UserError(sentence)` unless `holds`."""
    if not holds:
        raise UserError(sentence)


# Array sizes and counts: JAX indexes with 32 bits.
MOST = 2**31 - 1


def require_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise `UserError` unless `low <= value <= high` (NaN is never in range)."""
    bound = f"at least {low}" if high == math.inf else f"between {low} and {high}"
    require(low <= value <= high and value != math.inf, f"{name} must be {bound}, got {value}.")


def require_types(section: str, config: Any) -> None:
    """Raise `UserError` unless every field of the dataclass `config` has its type: a choice one of
    the words offered, a whole number an int (no bool), any number where a float is wanted."""
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            require(
                value in choices,
                f"{section}{name} must be one of {', '.join(choices)}, got {value!r}.",
            )
            continue
        if OwnBlock in get_args(kind):
            choices = get_args(get_args(kind)[0])
            require(
                value in choices or is_own(value),
                f"{section}{name} must be one of {', '.join(choices)}, or FILE.py:CLASS for a "
                f"block of your own, got {value!r}.",
            )
            continue
        kinds = get_args(kind) or (kind,)
        if float in kinds:
            kinds += (int,)
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        wanted = " or ".join(getattr(k, "__name__", str(k)) for k in get_args(kind) or (kind,))
        require(fits, f"{section}{name} must be {wanted}, got {value!r}.")


BlockName = Literal["pre", "post", "sandwich", "parallel"]
NormName = Literal["rms", "layer", "dyt"]
AttentionName = Literal["full", "sliding"]
MLPName = Literal["gelu", "silu", "relu", "relu2", "swiglu", "geglu", "moe"]
PositionsName = Literal["rotary", "learned", "sinusoidal", "alibi", "relative", "none"]

# A block of the user's own, see own.py: `FILE.py:CLASS`, or the class. (The command line's parser
# reads these annotations when the program runs, and could not make a class of a word.)
if TYPE_CHECKING:
    OwnBlock = str | type
else:
    OwnBlock = str
OWN_KNOBS = ("block", "norm", "attention", "mlp")


def is_own(value: Any) -> bool:
    """Whether a knob's value is a block of the user's own, or the name of one."""
    if isinstance(value, str):
        # A class that is not at the top of its file has dots in its name.
        return value.isprintable() and re.fullmatch(r".+\.py:[A-Za-z_][\w.<>]*", value) is not None
    return isinstance(value, type)


def block_name(value: str | type) -> str:
    """`FILE.py:CLASS` for a class; a name as it is."""
    if isinstance(value, str):
        return value
    try:
        file = os.path.relpath(inspect.getfile(value))
    except (TypeError, OSError, ValueError):  # typed at a prompt; on another drive
        file = f"{value.__module__}.py"
    return f"{file}:{value.__qualname__}"


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes tokens."""

    corpus: str = "auto"
    """`shakespeare` (TinyShakespeare), `pydoc` (Python's own documentation, needs no network),
    a UTF-8 text file, a folder of .txt files, or `hf:NAME[:SPLIT[:COLUMN]]` (a Hugging Face
    dataset). `auto` is shakespeare, or pydoc where that cannot be had."""

    tokenizer: str = "char"
    """`char` (the text's own characters), `byte` (UTF-8), or `tiktoken:NAME`, e.g.
    `tiktoken:gpt2`."""

    validation_tokens: int = 1_000_000
    """Validate on at most so many tokens of the text's last 10 %, from their beginning."""

    def __post_init__(self):
        require_types("data.", self)
        require_range("data.validation_tokens", self.validation_tokens, 2, MOST)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the network and which blocks it is built from."""

    n_layers: int = 3
    """Blocks in the stack."""

    n_heads: int = 2
    """Attention heads; must divide d_model."""

    n_kv_heads: int | None = None
    """Heads of keys and values; must divide n_heads. Fewer than n_heads: grouped-query attention,
    1: multi-query attention. None: n_heads."""

    d_model: int = 128
    """Width of the residual stream."""

    d_ff: int | None = None
    """Width inside the MLP. None: 4 d_model, or for swiglu and geglu, which have a third matrix,
    8/3 d_model rounded up to a multiple of 8. With moe: of all experts that a token has."""

    context_length: int = 256
    """Tokens that the model sees at once, in training and in generation."""

    block: BlockName | OwnBlock = "pre"
    """Where the norms stand: before attention and MLP, after them (outside the residual), on both
    sides (sandwich), or one before attention and MLP side by side (parallel). Here and below,
    FILE.py:CLASS takes a block of your own."""

    norm: NormName | OwnBlock = "rms"
    """RMSNorm, LayerNorm or DyT, in the blocks and before the head."""

    attention: AttentionName | OwnBlock = "full"
    """What a token attends to: all before it, or the last `window`."""

    window: int = 64
    """With sliding attention: tokens that a token sees, itself included."""

    mlp: MLPName | OwnBlock = "relu2"
    """The MLP's nonlinearity; swiglu and geglu add a gate; moe is a mixture of relu2 experts."""

    n_experts: int = 4
    """With moe: how many experts."""

    experts_per_token: int = 2
    """With moe: how many of them a token is sent to."""

    balance_loss: float = 0.01
    """With moe: weight of the loss that keeps the experts equally busy."""

    positions: PositionsName = "rotary"
    """How the model knows where a token stands. alibi and relative add to attention's scores by
    distance."""

    embed_previous: int = 2
    """How many earlier tokens are added to each token's embedding, each lag from a table of its
    own. Spares a small model a layer that only looks one character back."""

    scale_embedding: bool = False
    """Multiply embeddings by sqrt(d_model), from tables that start as much smaller (Vaswani et al.,
    2017, section 3.4)."""

    qk_norm: bool = True
    """RMS-normalise queries and keys before their product."""

    value_residual: bool = False
    """Add the first layer's values to every layer's."""

    logit_cap: float | None = None
    """Bound the logits smoothly to this size. None: no bound."""

    bias: bool = False
    """Biases in linear layers (but experts') and LayerNorms."""

    tied_head: bool = False
    """Use the embedding matrix as the output head too."""

    dropout: float = 0.0
    """Share of activations dropped in training: after the embedding and on what attention and MLP
    add to the residual stream."""

    attention_dropout: float = 0.0
    """Share of attention weights dropped in training. Above 0, a GPU cannot use its fused
    attention."""

    init: Literal["zero", "gpt2"] = "zero"
    """zero: matrices scaled by their input width, those that write to the residual stream (unless
    a norm follows) or the logits start at zero. gpt2: standard deviation 0.02, residual writers /
    sqrt(2 n_layers)."""

    stack: Literal["unrolled", "scan"] = "unrolled"
    """Run the layers one by one (fastest to run on a CPU) or by lax.scan (fastest to compile).
    The result is the same."""

    def __post_init__(self):
        require_types("model.", self)
        for name, most in (
            ("n_layers", 10_000),
            ("n_heads", 10_000),
            ("n_experts", 10_000),
            ("d_model", 1_000_000),
            ("window", 10_000_000),
            ("context_length", 10_000_000),
        ):
            require_range(f"model.{name}", getattr(self, name), 1, most)
        if self.d_ff is not None:
            require_range("model.d_ff", self.d_ff, 1, 10_000_000)
        require_range("model.embed_previous", self.embed_previous, 0, 64)
        require_range("model.experts_per_token", self.experts_per_token, 1, self.n_experts)
        require_range("model.balance_loss", self.balance_loss, 0.0)
        require_range("model.dropout", self.dropout, 0.0, 0.99)
        require_range("model.attention_dropout", self.attention_dropout, 0.0, 0.99)
        require(
            self.d_model % self.n_heads == 0,
            f"model.d_model must be a multiple of model.n_heads, got d_model {self.d_model} "
            f"and n_heads {self.n_heads}.",
        )
        if self.n_kv_heads is not None:
            require_range("model.n_kv_heads", self.n_kv_heads, 1, self.n_heads)
            require(
                self.n_heads % self.n_kv_heads == 0,
                f"model.n_heads must be a multiple of model.n_kv_heads, got n_heads {self.n_heads} "
                f"and n_kv_heads {self.n_kv_heads}.",
            )
        require(
            not (self.value_residual and (is_own(self.attention) or is_own(self.block))),
            "model.value_residual needs the package's own attention and block, got attention "
            f"{block_name(self.attention)} and block {block_name(self.block)}.",
        )
        require(
            self.logit_cap is None or 0.0 < self.logit_cap < math.inf,
            f"model.logit_cap must be a positive number or None, got {self.logit_cap}.",
        )
        require(
            self.positions != "rotary" or self.d_head % 2 == 0,
            "Rotary positions rotate pairs of channels, so d_model / n_heads must be even, got "
            f"{self.d_model} / {self.n_heads} = {self.d_head}.",
        )
        require(
            self.positions != "sinusoidal" or self.d_model % 2 == 0,
            "Sinusoidal positions come in pairs of sine and cosine, so d_model must be even, got "
            f"{self.d_model}.",
        )

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def d_hidden(self) -> int:
        """Width inside the MLP, with the default filled in."""
        if self.d_ff is not None:
            return self.d_ff
        gated = self.mlp in ("swiglu", "geglu")
        return -(-8 * self.d_model // 3 // 8) * 8 if gated else 4 * self.d_model


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become updates."""

    name: Literal["muon", "adamw"] = "muon"
    """muon: orthogonalised momentum for the matrices inside the blocks, Adam for the rest.
    adamw: Adam for everything."""

    learning_rate: float = 0.02
    """Peak learning rate (with muon: that of the matrices)."""

    adam_learning_rate: float = 0.01
    """With muon: peak learning rate of embedding, head, gains and biases."""

    schedule: Literal["cosine", "linear", "constant", "wsd", "noam"] = "wsd"
    """After the warm-up: cosine or straight line down to the end, constant, warm-up-stable-decay
    (constant, then a straight line down), or noam (as 1 / sqrt(step); its peak in Vaswani et al.,
    2017, eq. 3, is 1 / sqrt(d_model * warm-up steps))."""

    warmup_fraction: float = 0.03
    """Share of all steps over which the learning rate rises from 0 to its peak."""

    decay_fraction: float = 0.5
    """With wsd: share of all steps, at the end, over which the learning rate falls."""

    final_fraction: float = 0.0
    """The last learning rate as a share of the peak."""

    beta1: float = 0.9
    """Adam's decay of the mean of gradients (muon's own momentum is 0.95)."""

    beta2: float = 0.95
    """Adam's decay of the mean of squared gradients."""

    weight_decay: float = 0.0
    """Decoupled weight decay, times the learning rate, on matrices and embeddings."""

    clip_norm: float | None = None
    """Scale the gradient down to this global norm when it is larger. None: never."""

    def __post_init__(self):
        require_types("optimizer.", self)
        require_range("optimizer.learning_rate", self.learning_rate, 0.0)
        require_range("optimizer.adam_learning_rate", self.adam_learning_rate, 0.0)
        for name in ("warmup_fraction", "decay_fraction", "final_fraction"):
            require_range(f"optimizer.{name}", getattr(self, name), 0.0, 1.0)
        if self.schedule == "wsd":
            require(
                self.warmup_fraction + self.decay_fraction <= 1.0,
                "optimizer.warmup_fraction and optimizer.decay_fraction must add up to at most 1, "
                f"got {self.warmup_fraction} and {self.decay_fraction}.",
            )
        for name in ("beta1", "beta2"):
            require_range(f"optimizer.{name}", getattr(self, name), 0.0, 0.999999)
        require_range("optimizer.weight_decay", self.weight_decay, 0.0)
        if self.clip_norm is not None:
            require(
                0.0 < self.clip_norm < math.inf,
                f"optimizer.clip_norm must be a positive number or None, got {self.clip_norm}.",
            )


@dataclass(frozen=True)
class TrainingConfig:
    """How long, in what portions, and how often to look."""

    steps: int = 1200
    """Optimizer steps."""

    batch_size: int = 8
    """Windows of context_length tokens in one step."""

    accumulation: int = 1
    """Compute a step's gradient in this many equal parts, one after the other (less memory, same
    result); must divide batch_size."""

    label_smoothing: float = 0.0
    """Share of the target's probability spread over the whole vocabulary (training only)."""

    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of activations and matrix products; parameters, norms, softmax, loss and
    optimizer stay in float32, and so do evaluation and sampling. On a CPU without bfloat16
    instructions (AVX512-BF16, AMX), float32 is faster."""

    cpu_devices: int = 2
    """Without a GPU: how many devices train.py makes of the CPU, each with its own rows of a batch
    (fewer where they could not share it evenly). Two keep two cores busier than one that spreads
    each operation over both. The environment variable JAX_NUM_CPU_DEVICES overrides this."""

    steps_per_dispatch: int = 20
    """A line of metrics is written every so many steps, which are one compiled call where they take
    no longer than two seconds."""

    eval_every: int = 400
    """Evaluate (and sample a few lines) every so many steps, and at the end."""

    sample_tokens: int = 128
    """Length of the text sampled at each evaluation; 0 for none."""

    save_seconds: float = 300.0
    """Save a checkpoint at least so often, besides at each evaluation and when stopped. A run that
    is killed loses what it did since the last one."""

    keep: int = 2
    """How many checkpoints to keep: so many of the last ones, and of the best ones."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when a loss or a gradient is not a finite number. stop: end the run, and save the
    batch to look at. skip: leave that update out, and count it."""

    seed: int = 0
    """The run is a pure function of the config, this seed included; but for the order of sums,
    which the devices decide."""

    def __post_init__(self):
        require_types("training.", self)
        for name in ("steps", "batch_size", "accumulation", "steps_per_dispatch", "eval_every"):
            require_range(f"training.{name}", getattr(self, name), 1, MOST)
        require_range("training.cpu_devices", self.cpu_devices, 1, 1024)
        require_range("training.sample_tokens", self.sample_tokens, 0, MOST)
        require_range("training.save_seconds", self.save_seconds, 0.0)
        require_range("training.keep", self.keep, 1, MOST)
        require_range("training.label_smoothing", self.label_smoothing, 0.0, 0.99)
        require_range("training.seed", self.seed, 0, MOST)
        require(
            self.batch_size % self.accumulation == 0,
            "training.accumulation must divide training.batch_size, got accumulation "
            f"{self.accumulation} and batch_size {self.batch_size}.",
        )


@dataclass(frozen=True)
class MeshConfig:
    """How devices share the work. Those that are left take rows of the batch each."""

    fsdp: int = 1
    """Devices that share a batch and keep a part of every matrix each, which they gather layer by
    layer. For models that do not fit on one device."""

    tensor: int = 1
    """Devices that share the heads and the MLP's width. For models of which a single row is too
    much for one device."""

    def __post_init__(self):
        require_types("mesh.", self)
        require_range("mesh.fsdp", self.fsdp, 1, MOST)
        require_range("mesh.tensor", self.tensor, 1, MOST)


@dataclass(frozen=True)
class Config:
    """All of a run's knobs."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn. The filters apply in this order, each to what the one before
    it left."""

    temperature: float = 1.0
    """Divides the logits: below 1 safer, above 1 wilder."""

    top_k: int | None = None
    """Draw only from the k most probable tokens."""

    top_p: float | None = None
    """Draw only from the fewest most probable tokens that together reach probability p."""

    min_p: float | None = None
    """Draw only from tokens at least this share as probable as the most probable one."""

    greedy: bool = False
    """Always take the most probable token."""

    def __post_init__(self):
        require_types("", self)
        require(
            1e-6 <= self.temperature < math.inf,
            f"temperature must be a positive number (at least 1e-6), got {self.temperature}; for "
            "the most probable token every time, use greedy.",
        )
        if self.top_k is not None:
            require_range("top_k", self.top_k, 1, MOST)
        require(
            self.top_p is None or 0.0 < self.top_p <= 1.0,
            f"top_p must be above 0 and at most 1, got {self.top_p}.",
        )
        if self.min_p is not None:
            require_range("min_p", self.min_p, 0.0, 1.0)


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

_S = dataclasses.replace(
    GPT2_SMALL, n_layers=4, n_heads=4, d_model=128, context_length=64, bias=False
)
_M = dataclasses.replace(_S, n_layers=6, n_heads=6, d_model=384, context_length=256)

PRESETS: dict[str, tuple[str, Config]] = {
    "quick": ("the default: a minute or two on two CPU cores", Config(model=ModelConfig(d_ff=256))),
    "laptop": (
        "twice as deep, for a few minutes",
        Config(
            model=ModelConfig(n_layers=6, d_ff=256),
            training=TrainingConfig(steps=1800, eval_every=600),
        ),
    ),
    "gpu": (
        "shape M (10.7 M parameters) with our own blocks, for one data-centre GPU",
        Config(
            model=ModelConfig(n_layers=6, n_heads=6, d_model=384, context_length=256, dropout=0.2),
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
            training=TrainingConfig(steps=10000, batch_size=32, accumulation=8),
        ),
    ),
}


# What `--resume` may change, besides the name of the same text.
RESUMABLE = {
    "data": ("corpus",),
    "training": (
        "steps",
        "eval_every",
        "sample_tokens",
        "save_seconds",
        "keep",
        "on_nonfinite",
        "cpu_devices",
    ),
    "mesh": ("fsdp", "tensor"),
}


def require_resumable(before: Config, after: Config) -> None:
    """Raise `UserError`, naming every field, if `after` changes what `--resume` may not change."""
    changed = [
        f"{section}.{name} (the run has {old}, got {new})"
        for section, fields in dataclasses.asdict(before).items()
        for name, old in fields.items()
        if name not in RESUMABLE.get(section, ())
        and (new := getattr(getattr(after, section), name)) != old
    ]
    require(not changed, f"These may not change on --resume: {'; '.join(changed)}.")


def resolve_corpus(config: Config, corpus: str) -> Config:
    """`config` with the name of the corpus that was really loaded."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, corpus=corpus))


def plain(config: Config) -> dict[str, Any]:
    """`config` as plain data, with classes by name."""
    sections = dataclasses.asdict(config)
    model = sections["model"]
    sections["model"] = model | {k: block_name(model[k]) for k in OWN_KNOBS}
    return sections


def save_config(config: Config, path: Path) -> None:
    """Write `config` as JSON."""
    write_json(path, plain(config))


def load_config(path: Path) -> Config:
    """Read what `save_config` wrote.

    **Raises:** `UserError` where the file is no config of this version.
    """
    try:
        sections: dict[str, dict[str, Any]] = read_json(path)
        return Config(
            data=DataConfig(**sections.pop("data")),
            model=ModelConfig(**sections.pop("model")),
            optimizer=OptimizerConfig(**sections.pop("optimizer")),
            training=TrainingConfig(**sections.pop("training")),
            mesh=MeshConfig(**sections.pop("mesh")),
            **sections,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a readable gptlite config: {error}") from error
