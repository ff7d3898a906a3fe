"""Models in Hugging Face's format: configs and names of weights, both ways.

A folder of a model has `config.json` and `model.safetensors` (or several files and an index of
them). `transformers` describes the fields in its `configuration_*.py`.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gptlite.config import ModelConfig
from gptlite.errors import UserError, require
from gptlite.machine.fields import annotations, check_value
from gptlite.machine.files import is_plausible
from gptlite.machine.names import is_custom, split_options, with_options
from gptlite.models.build import find_part
from gptlite.nn.attention import AttentionOptions, SlidingOptions
from gptlite.nn.norms import LayerNormOptions, RMSNormOptions
from gptlite.nn.variants.rotary_options import RotaryOptions

# Their names of activations, by ours. GELU is the tanh approximation.
ACTIVATIONS = {
    "gelu": "gelu_pytorch_tanh",
    "silu": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "identity": "linear",
}
GATED = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}
# Other names of the same functions.
SYNONYMS = {"gelu_new": "gelu_pytorch_tanh", "swish": "silu"}

# Fields that `transformers` had before version 5, and other programs still read.
OLD_NAMES = {
    *("rope_theta", "rope_scaling", "rope_local_base_freq"),
    *("sliding_window_pattern", "full_attention_interval", "max_window_layers"),
}

# The size of a model, in any direction.
MAX_SIZE = 10_000_000
# Fields that change nothing that gptlite computes.
IGNORED = {
    *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache"),
    *("initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
    *("pretraining_tp", "task_specific_params", "max_window_layers", "cache_implementation"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout"),
    *("summary_proj_to_labels", "n_ctx", "reorder_and_upcast_attn", "gradient_checkpointing"),
    *(
        "is_llama_config",
        "transformers.js_config",
        "vocab_size",
        "gptlite",
        "chunk_size_feed_forward",
    ),
    *("output_hidden_states", "output_attentions", "return_dict", "id2label", "label2id"),
    *("problem_type", "is_encoder_decoder", "default_theta"),
    # Notes of libraries that wrote a model, and how old configs said how to generate.
    *("tokenizer_class", "unsloth_fixed", "unsloth_version", "output_past", "num_labels"),
    *("predict_special_tokens", "max_sequence_length", "finetuning_task", "torchscript", "prefix"),
    *("is_decoder", "tie_encoder_decoder", "use_bfloat16", "max_length", "min_length"),
    *("do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences"),
    *("output_scores", "return_dict_in_generate", "remove_invalid_values"),
}

# The values that `transformers` takes for a field that is absent (one that is null is another
# thing), where they differ between architectures.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "arcee": {"rms_norm_eps": 1e-5},
    "gemma3_text": {"num_key_value_heads": 4, "sliding_window": 4096, "head_dim": 256},
}


@dataclass(frozen=True)
class Family:
    """An architecture of `transformers`, and its names of our modules."""

    model_type: str
    architecture: str
    top: Mapping[str, str]
    layer: Mapping[str, str]
    """The names in a layer, after the prefix `layers`."""
    layers: str = "model.layers"
    transposed: bool = False
    """Whether matrices of layers are `[d_in, d_out]`."""
    gain_offset: float = 0.0
    """The number that is added to a stored gain of a norm."""
    plain: tuple[str, ...] = ()
    """Our norms to whose gains it is not added."""
    joined: tuple[str, ...] = ()
    """Our modules whose rows follow each other in one of theirs."""
    by_head: tuple[str, ...] = ()
    """Our modules whose rows do so head by head."""
    passed: tuple[str, ...] = ()
    """What the names of tensors begin with that gptlite does without."""
    arrays: Mapping[str, str] = field(default_factory=dict)
    """The names in a layer of arrays that are named otherwise than `layer` says."""


_TOP = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_ATTENTION = {
    f"attention.heads.{ours}": f"self_attn.{theirs}"
    for ours, theirs in (
        *(("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj")),
        *(("query_norm", "q_norm"), ("key_norm", "k_norm")),
    )
}
_MLP = {f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_PRE = {
    "attention_residual.norm": "input_layernorm",
    "mlp_residual.norm": "post_attention_layernorm",
}
_SANDWICH = {
    "attention_residual.norm": "input_layernorm",
    "attention_residual.norm_out": "post_attention_layernorm",
    "mlp_residual.norm": "pre_feedforward_layernorm",
    "mlp_residual.norm_out": "post_feedforward_layernorm",
}
# The kinds of layers in a hybrid.
KINDS = ("base", "nth")
_LLAMA = _ATTENTION | _MLP | _PRE
_GEMMA = _ATTENTION | _MLP | _SANDWICH
FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", _TOP, _LLAMA),
        Family("mistral", "MistralForCausalLM", _TOP, _LLAMA),
        Family("qwen2", "Qwen2ForCausalLM", _TOP, _LLAMA),
        Family("qwen3", "Qwen3ForCausalLM", _TOP, _LLAMA),
        Family("arcee", "ArceeForCausalLM", _TOP, _LLAMA),
        Family(
            *("gemma3_text", "Gemma3ForCausalLM", _TOP),
            _GEMMA | {f"{kind}.{ours}": x for kind in KINDS for ours, x in _GEMMA.items()},
            gain_offset=1.0,
        ),
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            {
                "embedding": "transformer.wte",
                "positions": "transformer.wpe",
                "norm": "transformer.ln_f",
                "head": "lm_head",
            },
            {
                "attention_residual.norm": "ln_1",
                "mlp_residual.norm": "ln_2",
                "attention.heads.query": "attn.c_attn",
                "attention.heads.key": "attn.c_attn",
                "attention.heads.value": "attn.c_attn",
                "attention.heads.output": "attn.c_proj",
                "mlp.up": "mlp.c_fc",
                "mlp.down": "mlp.c_proj",
            },
            layers="transformer.h",
            transposed=True,
            joined=("attention.heads.query", "attention.heads.key", "attention.heads.value"),
        ),
        Family(
            *("qwen3_5_text", "Qwen3_5ForCausalLM", _TOP),
            {
                **{f"{kind}.{ours}": x for kind in KINDS for ours, x in (_MLP | _PRE).items()},
                **{f"nth.{ours}": theirs for ours, theirs in _ATTENTION.items()},
                "nth.attention.gate": "self_attn.q_proj",
                **{
                    f"base.attention.{ours}": f"linear_attn.{theirs}"
                    for ours, theirs in (
                        *((x, "in_proj_qkv") for x in ("query", "key", "value")),
                        *(("gate", "in_proj_z"), ("strength", "in_proj_b"), ("decay", "in_proj_a")),
                        *(("norm", "norm"), ("output", "out_proj"), ("conv.weights", "conv1d")),
                    )
                },
            },
            gain_offset=1.0,
            plain=("base.attention.norm",),
            joined=tuple(f"base.attention.{x}" for x in ("query", "key", "value")),
            by_head=("nth.attention.heads.query", "nth.attention.gate"),
            # What sees pictures, and what predicts more tokens than the next.
            passed=("model.visual.", "mtp."),
            arrays={
                "base.attention.log_rate": "linear_attn.A_log",
                "base.attention.decay_bias": "linear_attn.dt_bias",
                **{
                    f"base.attention.conv.weights.{i}": "linear_attn.conv1d.weight"
                    for i in range(64)
                },
            },
        ),
    )
}
# What the names of our parameters in layers begin with.
LAYER = "stack.blocks."


# From our config to theirs.


def to_hf_config(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The fields of `config.json` for a model of `config`.

    **Raises:** `UserError`, which names everything that no architecture can express, and the
    options without it.
    """
    return _Export(config).fields(vocab_size)


class _Export:
    """Finds the architecture for a config."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.norm, self.norm_options = self._part("norm")
        self.attention, options = self._part("attention")
        self.attention_options = options or AttentionOptions()
        self.every, _, self.other = str(config.attention_every or "").partition(":")
        kind = dataclasses.replace(config, attention=self.other) if self.other else config
        _, self.other_options = self._part("attention", kind)
        self.mlp, _ = self._part("mlp")
        self.positions, self.position_options = self._part("positions")
        self.qkv_bias = config.bias or self.attention_options.qkv_bias
        self.output_bias = config.bias or self.attention_options.output_bias
        self.same_bias = self.qkv_bias == self.output_bias
        self.obstacles: list[str] = []
        # The obstacles in attention; the name and the changed options of one without them.
        self.of_attention: list[str] = []
        self.wanted = self.attention if self.attention in ("full", "sliding") else "full"
        self.changes: dict[str, Any] = {}

    def _part(self, field: str, config: ModelConfig | None = None) -> tuple[str, Any]:
        """The name of the part `config.FIELD`, and its options; None if it has none."""
        config = self.config if config is None else config
        name, _ = split_options(getattr(config, field))
        return name, None if is_custom(name) else find_part(field, config)[1].get("options")

    def need(self, holds: bool, what: str, option: str) -> None:
        if not holds:
            self.obstacles.append(f"{what} ({option})")

    def need_attention(self, holds: bool, what: str, name: str = "", **changes: Any) -> None:
        """`need`, with the option for the attention of that name, and with such changes."""
        if not holds:
            self.of_attention.append(what)
            self.wanted = name or self.wanted
            self.changes |= changes

    def need_unbiased(self, holds: bool, what: str) -> None:
        """`need`, with the option for no biases."""
        if self.config.bias:
            self.need(holds, what, "--model.no-bias")
        else:
            self.need_attention(holds, what, qkv_bias=False, output_bias=False)

    def wanted_attention(self) -> str:
        """What `need_attention` was told, as an option."""
        kind = SlidingOptions if self.wanted == "sliding" else AttentionOptions
        names = {option.name for option in dataclasses.fields(kind)}
        given: dict[str, Any] = vars(self.attention_options) | self.changes
        options = kind(**{name: x for name, x in given.items() if name in names})
        return f"--model.attention {with_options(self.wanted, options)}"

    def positions_with(self, **changes: Any) -> str:
        """The option for rotary positions with such changes."""
        options = self.position_options
        options = options if isinstance(options, RotaryOptions) else RotaryOptions()
        options = dataclasses.replace(options, **changes)
        return f"--model.positions {with_options('rotary', options)}"

    def fields(self, vocab_size: int) -> dict[str, Any]:
        config = self.config
        self.need(
            config.embed_previous == 0,
            "embeddings of earlier tokens",
            "--model.embed-previous 0",
        )
        is_gpt2 = self.norm == "layer" or self.positions == "learned"
        if config.attention_every is not None and self.attention not in ("full", "sliding"):
            fields = self.qwen3_5()
        else:
            fields = self.gpt2() if is_gpt2 else self.llama()
        self.need(not self.of_attention, "; ".join(self.of_attention), self.wanted_attention())
        require(
            not self.obstacles,
            "No architecture of Hugging Face's transformers has: "
            f"{'; '.join(self.obstacles)}. In brackets: the option of `gptlite train` for a model "
            "that can be exported.",
        )
        family = FAMILIES[fields["model_type"]]
        return fields | {
            "architectures": [family.architecture],
            "vocab_size": vocab_size,
            "tie_word_embeddings": config.tied_head,
            "dtype": "float32",
            "bos_token_id": None,
            "eos_token_id": None,
            "gptlite": dataclasses.asdict(config),
        }

    @property
    def eps(self) -> float:
        return getattr(self.norm_options, "eps", RMSNormOptions.eps)

    def gpt2(self) -> dict[str, Any]:
        config = self.config
        self.need(config.block == "pre", f"GPT-2 with block {config.block}", "--model.block pre")
        self.need(self.norm == "layer", f"GPT-2 with norm {config.norm}", "--model.norm layer")
        self.need(
            self.positions == "learned",
            f"LayerNorm with {config.positions} positions",
            "--model.positions learned, or --model.norm rms",
        )
        self.need_attention(self.attention == "full", f"GPT-2 with {config.attention}", "full")
        self.need(
            not self.every, "GPT-2 with layers of two kinds", "without --model.attention-every"
        )
        self.need(
            config.n_kv_heads in (None, config.n_heads),
            "GPT-2 with heads that share keys",
            "without --model.n-kv-heads",
        )
        self.need(config.head_size is None, "GPT-2 with a head size", "without --model.head-size")
        self.need(not config.qk_norm, "GPT-2 with QK-norm", "--model.no-qk-norm")
        self.need(self.mlp in ACTIVATIONS, f"GPT-2 with mlp {config.mlp}", "--model.mlp gelu")
        self.common(scale=False, cap=False)
        return {
            "model_type": "gpt2",
            "n_layer": config.n_layers,
            "n_head": config.n_heads,
            "n_embd": config.d_model,
            "n_inner": config.d_hidden,
            "n_positions": config.context_length,
            "activation_function": ACTIVATIONS.get(self.mlp),
            "layer_norm_epsilon": self.eps,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        }

    def common(self, *, scale: bool, cap: bool) -> None:
        config = self.config
        if not scale:
            self.need(not config.scale_embedding, "scaled embeddings", "--model.no-scale-embedding")
        if not cap:
            self.need(config.logit_cap is None, "capped logits", "without --model.logit-cap")

    def sizes(self) -> dict[str, Any]:
        """What all but GPT-2 name alike."""
        config = self.config
        return {
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.n_kv_heads or config.n_heads,
            "head_dim": config.d_head,
            "hidden_size": config.d_model,
            "intermediate_size": config.d_hidden,
            "max_position_embeddings": config.context_length,
            "rms_norm_eps": self.eps,
            "attention_dropout": 0.0,
        }

    def llama(self) -> dict[str, Any]:
        config = self.config
        eps, window = self.eps, getattr(self.attention_options, "window", None)
        self.need(self.norm == "rms", f"norm {config.norm}", "--model.norm rms")
        self.need(
            self.positions == "rotary", f"positions {config.positions}", "--model.positions rotary"
        )
        self.need(
            getattr(self.position_options, "share", 1.0) == 1,
            f"positions {config.positions}",
            self.positions_with(share=1.0),
        )
        self.need_attention(self.attention in ("full", "sliding"), f"{config.attention}")
        self.need_attention(
            not config.qk_norm or self.attention_options.qk_eps == eps,
            "a QK-norm with an epsilon of its own",
            qk_eps=eps,
        )
        if self.every:
            self.of_two_kinds()
        else:
            of_these = config.block in ("pre", "sandwich")
            self.need(of_these, f"block {config.block}", "--model.block pre")
        activation = ACTIVATIONS.get(self.mlp) or GATED.get(self.mlp)
        is_gemma = self.every != "" or config.block == "sandwich"
        self.need(is_gemma or activation is not None, f"mlp {config.mlp}", "--model.mlp swiglu")
        gated = self.mlp in GATED
        rope = self.rope(self.other_options)
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        fields = self.sizes() | {
            "hidden_act": activation,
            "rope_parameters": rope,
            "rope_theta": rope.get("rope_theta"),
            "rope_scaling": scaling if rope.get("rope_type") == "llama3" else None,
            "attention_bias": self.qkv_bias,
        }
        if is_gemma:
            return self.gemma3(fields, window)
        self.common(scale=False, cap=False)
        if config.qk_norm:
            self.need_unbiased(self.same_bias and not config.bias, "QK-norm with these biases")
            self.need(
                gated or activation is None or self.mlp == "relu2",
                f"QK-norm with mlp {config.mlp}",
                "--model.mlp relu2, or --model.no-qk-norm",
            )
            sliding = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
            kind = "full_attention" if window is None else "sliding_attention"
            fields |= {} if window is None else sliding
            # relu(x) · x is relu²(x): the gate is a copy of the other matrix.
            fields |= {} if gated else {"hidden_act": "relu"}
            return fields | {"model_type": "qwen3", "layer_types": [kind] * config.n_layers}
        if not gated:
            self.whole_heads()
            self.need_attention(window is None, "a window without a gated MLP", "full")
            self.need_unbiased(self.same_bias, "biases of some matrices without a gated MLP")
            return fields | {"model_type": "arcee", "mlp_bias": config.bias}
        if self.qkv_bias and not self.output_bias:
            self.need(
                config.head_size in (None, config.d_model // config.n_heads),
                "biases of queries, keys and values with a head size",
                "without --model.head-size",
            )
            self.need_attention(window is None, "a window with biases", "full")
            del fields["attention_bias"], fields["head_dim"]
            return fields | {"model_type": "qwen2", "use_sliding_window": False}
        self.need_unbiased(self.same_bias, "a bias of the output matrix alone")
        if window is not None:
            self.need_unbiased(not self.qkv_bias, "a window with biases")
            del fields["attention_bias"]
            return fields | {"model_type": "mistral", "sliding_window": window}
        self.whole_heads()
        return fields | {"model_type": "llama", "mlp_bias": config.bias}

    def of_two_kinds(self) -> None:
        """Gemma 3's: sliding attention, and full attention in every Nth layer."""
        block = self.config.block
        self.need(block == "sandwich", f"two kinds with block {block}", "--model.block sandwich")
        what = f"attention {self.config.attention} with another one"
        self.need_attention(self.attention == "sliding", what, "sliding", qk_eps=self.eps)
        wanted = AttentionOptions(
            qkv_bias=self.attention_options.qkv_bias,
            output_bias=self.attention_options.output_bias,
            qk_gain=getattr(self.other_options, "qk_gain", False),
            qk_eps=self.eps,
            theta=getattr(self.other_options, "theta", None),
        )
        self.need(
            split_options(self.other)[0] == "full" and self.other_options == wanted,
            f"attention {self.other} in every Nth layer",
            f"--model.attention-every {self.every}:{with_options('full', wanted)}",
        )

    def gemma3(self, fields: dict[str, Any], window: int | None) -> dict[str, Any]:
        config = self.config
        self.need(self.mlp == "geglu", f"sandwich norms with mlp {config.mlp}", "--model.mlp geglu")
        self.need(config.qk_norm, "sandwich norms without QK-norm", "--model.qk-norm")
        self.need(
            config.scale_embedding,
            "sandwich norms without scaled embeddings",
            "--model.scale-embedding",
        )
        self.need_unbiased(self.same_bias and not config.bias, "sandwich norms with these biases")
        self.whole_heads()
        # Before version 5, positions of layers with a window were not scaled.
        self.need(
            window is None or getattr(self.position_options, "factor", 1.0) == 1,
            "in all its versions, scaled positions with a window",
            self.positions_with(factor=1.0),
        )
        kind = "full_attention" if window is None else "sliding_attention"
        local = self.rope(self.attention_options)
        fields = {name: x for name, x in fields.items() if name != "hidden_act"}
        return fields | {
            "model_type": "gemma3_text",
            "hidden_activation": GATED["geglu"],
            "query_pre_attn_scalar": config.d_head,
            "layer_types": _layer_types(config.n_layers, self.every, kind),
            # N, where every Nth layer is full: 1 for all, more than there are for none.
            "sliding_window_pattern": 1
            if window is None
            else int(self.every or config.n_layers + 1),
            "sliding_window": window or config.context_length,
            "rope_parameters": {
                "full_attention": fields["rope_parameters"],
                "sliding_attention": local,
            },
            "rope_local_base_freq": local.get("rope_theta"),
            "final_logit_softcapping": config.logit_cap,
        }

    def qwen3_5(self) -> dict[str, Any]:
        """The one with layers of two kinds: a gated delta rule, and gated attention."""
        config, rotary = self.config, self.position_options
        options = self.other_options
        self.need(
            self.attention == "gated_deltanet",
            f"attention {config.attention} with another one",
            "--model.attention gated_deltanet",
        )
        wanted = AttentionOptions(qk_gain=isinstance(options, AttentionOptions) and options.qk_gain)
        self.need(
            split_options(self.other)[0] == "gated" and options == wanted,
            f"attention {self.other} in every Nth layer",
            f"--model.attention-every {self.every}:{with_options('gated', wanted)}",
        )
        self.need(config.qk_norm, "these layers without QK-norm", "--model.qk-norm")
        self.need(config.norm == "rms", f"norm {config.norm} in these", "--model.norm rms")
        self.need(config.block == "pre", f"block {config.block} in these", "--model.block pre")
        self.need(self.mlp == "swiglu", f"mlp {config.mlp} in these", "--model.mlp swiglu")
        self.need(not config.bias, "biases in these", "--model.no-bias")
        plain = RotaryOptions(
            theta=getattr(rotary, "theta", RotaryOptions.theta), share=getattr(rotary, "share", 1.0)
        )
        option = f"--model.positions {with_options('rotary', plain)}"
        self.need(rotary == plain, f"positions {config.positions}", option)
        self.common(scale=False, cap=False)
        sizes = {} if is_custom(self.attention) else find_part("attention", config)[1]
        kept = (f"{name}={x}" for name, x in sizes.items() if name != "negative")
        self.need(
            self.attention != "gated_deltanet" or not sizes.get("negative"),
            "strengths between 0 and 2",
            f"--model.attention {':'.join(['gated_deltanet', *kept])}",
        )
        heads = sizes.get("heads", config.n_heads)
        return self.sizes() | {
            "model_type": "qwen3_5_text",
            "hidden_act": "silu",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": plain.theta,
                "partial_rotary_factor": plain.share,
            },
            "attention_bias": False,
            "linear_num_value_heads": heads,
            "linear_num_key_heads": sizes.get("key_heads", heads),
            "linear_key_head_dim": sizes.get("key_size", config.d_head),
            "linear_value_head_dim": sizes.get("value_size", config.d_head),
            "linear_conv_kernel_dim": sizes.get("conv", 4),
            "layer_types": _layer_types(config.n_layers, self.every, "linear_attention"),
            "full_attention_interval": int(self.every),
        }

    def whole_heads(self) -> None:
        """`transformers` refuses other widths in some architectures, whatever the `head_dim`."""
        config = self.config
        self.need(
            config.d_model % config.n_heads == 0,
            f"a width of {config.d_model} with {config.n_heads} heads here",
            "--model.d-model, a multiple of --model.n-heads",
        )

    def rope(self, attention: AttentionOptions | None) -> dict[str, Any]:
        """Of positions in `attention`."""
        options = self.position_options
        if not isinstance(options, RotaryOptions):  # an obstacle
            return {}
        theta = {"rope_theta": getattr(attention, "theta", None) or options.theta}
        if options.factor == 1:
            return theta | {"rope_type": "default"}
        return theta | {
            "rope_type": "llama3",
            "factor": options.factor,
            "low_freq_factor": options.low_frequency,
            "high_freq_factor": options.high_frequency,
            "original_max_position_embeddings": options.original_context,
        }


def _layer_types(n_layers: int, every: int | str, kind: str) -> list[str]:
    """All `kind`, but for every Nth, if there is one."""
    kinds, every = (kind, "full_attention"), int(every or n_layers + 1)
    return [kinds[(i + 1) % every == 0] for i in range(n_layers)]


def _every_nth(types: list[str], n_layers: int, kind: str) -> int:
    """The `every` of such types."""
    every = types.index("full_attention") + 1 if "full_attention" in types else 1
    require(
        every > 1 and types == _layer_types(n_layers, every, kind),
        f"The model's layer_types must be {kind}, but for every Nth layer, which is "
        f"full_attention, got {str(types)[:100]}.",
    )
    return every


# From their config to ours.


def from_hf_config(fields: Mapping[str, Any]) -> ModelConfig:
    """Our config for a model with these fields in its `config.json`.

    **Raises:** `UserError`, which names the field, for what gptlite does not have.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(f"The model's model_type is {kind!r}: gptlite has {', '.join(FAMILIES)}.")
    reader = _Import({**DEFAULTS.get(kind, {}), **fields})
    own = reader.own()
    if own is not None:
        return own
    kinds = {"gpt2": reader.gpt2, "qwen3_5_text": reader.qwen3_5}
    config = kinds[kind]() if kind in kinds else reader.llama(kind)
    reader.end()
    return config


def text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the language model in a model that also sees pictures; of others, `fields`.

    **Raises:** `UserError` if there are none.
    """
    if fields.get("model_type") != "qwen3_5":
        return fields
    text = fields.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"The model's text_config must be fields, got {str(text)[:100]!r}.")
    outer = ("tie_word_embeddings", "eos_token_id")
    return {**text, **{name: fields[name] for name in outer if name in fields}}


def vocab_size_of(fields: Mapping[str, Any]) -> int:
    """The rows of the embedding.

    **Raises:** `UserError` if the field is missing or no size.
    """
    return _Import(fields).size("vocab_size")


class _Import:
    """The fields of a config, each of which must be asked for, or change nothing."""

    def __init__(self, fields: Mapping[str, Any]):
        self.fields = fields
        self.asked = set(IGNORED)

    def get(self, name: str, default: Any = None, kind: type = object) -> Any:
        """The value of a field, of type `kind`, or `default`."""
        self.asked.add(name)
        value = self.fields.get(name)
        if value is not None and not isinstance(value, kind):
            shown = str(value)[:100]
            raise UserError(f"The model's {name} must be of type {kind.__name__}, got {shown!r}.")
        return default if value is None else value

    def number(self, name: str, ours: type, field: str, default: Any = None) -> Any:
        """The value of a field, checked as `field` of our class `ours` is."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not is_plausible(value):
            raise UserError(f"The model's {name} must be a number, got {str(value)[:100]!r}.")
        return check_value(f"The model's {name}", value, annotations(ours)[field])

    def size(self, name: str, default: Any = None) -> int:
        value = self.get(name, default)
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise UserError(
                f"The model's {name} must be a whole number from 1 to {MAX_SIZE:,}, got "
                f"{str(value)[:100]!r}."
            )
        return value

    def require(self, name: str, *allowed: Any, default: Any = None) -> Any:
        """The value of a field, which must be one of `allowed`."""
        value = self.get(name, default)
        found = [x for x in allowed if x == value]
        if not found:
            choices = " or ".join(repr(x) for x in allowed)
            shown = repr(value)[:100]
            raise UserError(f"The model's {name} is {shown}: gptlite has {choices} only.")
        return found[0]  # 1 is True

    def left(self) -> Iterator[str]:
        """The fields that were not asked for and may change what is computed."""
        for name, value in self.fields.items():
            is_token = name.startswith("_") or name.endswith("_token_id")
            if not is_token and name not in self.asked and value not in (None, False, [], {}, ""):
                yield name

    def end(self) -> None:
        """**Raises:** `UserError` if there is such a field."""
        for name in self.left():
            shown = str(self.fields[name])[:100]
            raise UserError(
                f"The model's config has a field {name}, {shown}, that gptlite does not know."
            )

    def own(self) -> ModelConfig | None:
        """The config that gptlite has written, if the other fields are still what it says."""
        try:
            config = ModelConfig(**self.fields["gptlite"])
            written = to_hf_config(config, self.fields["vocab_size"])
        except (KeyError, TypeError, ValueError):
            return None
        reader = _Import(self.fields)
        reader.asked |= written.keys() | DEFAULTS.get(written["model_type"], {}).keys()
        # Other programs leave old names out.
        same = all(
            self.fields.get(name) == value or (name in OLD_NAMES and name not in self.fields)
            for name, value in written.items()
        )
        return config if same and not any(reader.left()) else None

    def gpt2(self) -> ModelConfig:
        self.require("scale_attn_weights", True, default=True)
        for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            self.require(name, False, default=False)
        activation = self.activation("activation_function", "gelu_new", ACTIVATIONS)
        eps = self.number("layer_norm_epsilon", LayerNormOptions, "eps", 1e-5)
        return ModelConfig(
            n_layers=self.size("n_layer", 12),
            n_heads=self.size("n_head", 12),
            d_model=self.size("n_embd", 768),
            d_ff=self.size("n_inner", 4 * self.size("n_embd", 768)),
            context_length=self.size("n_positions", 1024),
            norm=with_options("layer", LayerNormOptions(eps=eps)),
            mlp=activation,
            positions="learned",
            embed_previous=0,
            qk_norm=False,
            bias=True,
            tied_head=self.require("tie_word_embeddings", True, False, default=True),
            init="gpt2",
        )

    def qwen3_5(self) -> ModelConfig:
        n_layers, n_heads = self.size("num_hidden_layers"), self.size("num_attention_heads")
        d_model = self.size("hidden_size")
        d_head = self.size("head_dim", 256)
        every = self.size("full_attention_interval", 4)
        types = self.get("layer_types", _layer_types(n_layers, every, "linear_attention"), list)
        every = _every_nth(types, n_layers, "linear_attention")
        self.require("rms_norm_eps", 1e-6, default=1e-6)
        self.require("attention_bias", False, default=False)
        self.require("attn_output_gate", True, default=True)
        # Of predictors of more tokens, which gptlite does without; of a format.
        self.asked |= {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"}
        sizes = {
            "heads": self.size("linear_num_value_heads", 32),
            "key_heads": self.size("linear_num_key_heads", 16),
            "key_size": self.size("linear_key_head_dim", 128),
            "value_size": self.size("linear_value_head_dim", 128),
            "conv": self.size("linear_conv_kernel_dim", 4),
        }
        return ModelConfig(
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=self.size("num_key_value_heads", 4),
            head_size=None if d_head * n_heads == d_model else d_head,
            d_model=d_model,
            d_ff=self.size("intermediate_size"),
            context_length=self.size("max_position_embeddings"),
            attention=":".join(["gated_deltanet", *(f"{name}={x}" for name, x in sizes.items())]),
            attention_every=f"{every}:gated:qk_gain=true",
            mlp=self.activation("hidden_act", "silu", {"swiglu": "silu"}),
            positions=with_options("rotary", self.rope("qwen3_5_text", False)),
            embed_previous=0,
            tied_head=self.require("tie_word_embeddings", True, False, default=False),
            init="gpt2",
        )

    def activation(self, field: str, default: str, table: Mapping[str, str]) -> str:
        theirs = self.get(field, default, str)
        theirs = SYNONYMS.get(theirs, theirs)
        for ours, name in table.items():
            if name == theirs:
                return ours
        raise UserError(
            f"The model's {field} is {theirs!r}: gptlite has {', '.join(table.values())} there."
        )

    def llama(self, kind: str) -> ModelConfig:
        n_layers, n_heads = self.size("num_hidden_layers"), self.size("num_attention_heads")
        d_model, is_gemma = self.size("hidden_size"), kind == "gemma3_text"
        d_head = self.size("head_dim", d_model // n_heads)
        eps = self.number("rms_norm_eps", RMSNormOptions, "eps", 1e-6)
        window, every = self.window(kind, n_layers)
        attention_bias = self.require("attention_bias", True, False, default=False)
        mlp_bias = self.require("mlp_bias", True, False, default=False)
        require(
            not mlp_bias or bool(attention_bias),
            "The model's mlp_bias is True: gptlite has that with attention_bias.",
        )
        qk_norm = kind == "qwen3" or is_gemma
        some_biases = kind == "qwen2" or (attention_bias and not mlp_bias)
        options = AttentionOptions(
            qkv_bias=some_biases,
            output_bias=some_biases and attention_bias,
            qk_gain=qk_norm,
            qk_eps=eps if qk_norm else AttentionOptions.qk_eps,
        )
        positions, nth = self.rope(kind, window is not None and every is None), None
        if every is not None:
            nth = f"{every}:{with_options('full', options)}"
        if window is not None:
            options = SlidingOptions(**vars(options), window=window)
        if every is not None:
            local = self.rope(kind, True)
            require(
                dataclasses.replace(local, theta=positions.theta) == positions,
                "The model's rope_parameters of sliding_attention must be those of full_attention, "
                f"but for their rope_theta, got {local} and {positions}.",
            )
            options = dataclasses.replace(options, theta=local.theta)
        if is_gemma:
            self.require("query_pre_attn_scalar", d_head, default=256)
            for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
                self.require(name, None, False)
            self.asked.add("sliding_window_pattern")
        cap = self.get("final_logit_softcapping") if is_gemma else None
        table = ACTIVATIONS if kind == "arcee" else GATED
        default = {"arcee": "relu2", "gemma3_text": GATED["geglu"]}.get(kind, "silu")
        return ModelConfig(
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=self.size("num_key_value_heads", n_heads),
            head_size=None if d_head * n_heads == d_model else d_head,
            d_model=d_model,
            d_ff=self.size("intermediate_size"),
            context_length=self.size("max_position_embeddings"),
            block="sandwich" if is_gemma else "pre",
            norm=with_options("rms", RMSNormOptions(eps=eps)),
            attention=with_options("full" if window is None else "sliding", options),
            attention_every=nth,
            mlp=self.activation("hidden_activation" if is_gemma else "hidden_act", default, table),
            positions=with_options("rotary", positions),
            embed_previous=0,
            scale_embedding=is_gemma,
            qk_norm=qk_norm,
            logit_cap=None
            if cap is None
            else self.number("final_logit_softcapping", ModelConfig, "logit_cap"),
            bias=mlp_bias,
            tied_head=self.require("tie_word_embeddings", True, False, default=is_gemma),
            init="gpt2",
        )

    def window(self, kind: str, n_layers: int) -> tuple[int | None, int | None]:
        """How many tokens a token attends to (None: all); and N, if it attends to all of them in
        every Nth layer."""
        given = self.get("sliding_window") is not None
        window = self.size("sliding_window") if given else None
        if kind == "mistral":
            return window, None
        types, is_gemma = self.get("layer_types", kind=list), kind == "gemma3_text"
        uses = self.get("use_sliding_window", False, bool) and window is not None
        if kind in ("llama", "arcee") or not (is_gemma or uses):
            return None, None
        if types is None:
            first = self.get("max_window_layers", 28, int)
            every = self.size("sliding_window_pattern", 6)
            is_full = [(i + 1) % every == 0 if is_gemma else i < first for i in range(n_layers)]
            types = ["full_attention" if full else "sliding_attention" for full in is_full]
        if types == ["full_attention"] * n_layers:
            return None, None
        window = self.size("sliding_window")  # raises, if Gemma's is null
        if types == ["sliding_attention"] * n_layers:
            return window, None
        require(
            is_gemma,
            "The model's layer_types differ: gptlite reads two kinds from qwen3_5_text and "
            "gemma3_text only.",
        )
        return window, _every_nth(types, n_layers, "sliding_attention")

    def rope(self, kind: str, sliding: bool) -> RotaryOptions:
        """The options of `rotary`, in layers of sliding attention or in others. (Their classes read
        old names of fields, too: see `convert_rope_params_to_dict`.)"""
        rope_fields = self.get("rope_parameters", {}, dict)
        scaling = self.get("rope_scaling", {}, dict)
        share = 1.0
        if kind == "qwen3_5_text":
            # How positions in pictures are divided: those of text are the same for all.
            of_pictures = ("mrope_section", "mrope_interleaved")
            rope_fields = {name: x for name, x in rope_fields.items() if name not in of_pictures}
            share = self.number("partial_rotary_factor", RotaryOptions, "share", 0.25)
        else:
            self.require("partial_rotary_factor", 1.0, default=1.0)
        if kind == "gemma3_text":
            of = _Import(rope_fields)
            kinds = ("full_attention", "sliding_attention")
            full, of_sliding = (of.get(x, {}, dict) for x in kinds)
            of.end()
            full = {"rope_theta": self.get("rope_theta", 1_000_000.0), **full, **scaling}
            local = self.number("rope_local_base_freq", RotaryOptions, "theta", 10_000.0)
            of_sliding = {"rope_theta": local, **of_sliding}
            rope_fields = of_sliding if sliding else full
        else:
            rope_fields = {
                "rope_theta": self.get("rope_theta", 10_000.0),
                **(scaling or rope_fields),
            }
        if "type" in rope_fields:  # its name before
            rope_fields = {"rope_type": rope_fields["type"], **rope_fields}
            del rope_fields["type"]
        rope = _Import({f"rope_parameters.{name}": x for name, x in rope_fields.items()})
        rope.asked.clear()
        partial = "rope_parameters.partial_rotary_factor"
        share = rope.number(partial, RotaryOptions, "share", share)
        require(
            share == 1 or kind == "qwen3_5_text",
            f"The model's {partial} is {share}: gptlite has 1.0 only, but for qwen3_5_text.",
        )
        theta = rope.number("rope_parameters.rope_theta", RotaryOptions, "theta")
        options: dict[str, Any] = {"theta": theta, "share": share}
        if (
            rope.require("rope_parameters.rope_type", "default", "llama3", default="default")
            == "llama3"
        ):
            options |= {
                ours: rope.number(f"rope_parameters.{theirs}", RotaryOptions, ours)
                for ours, theirs in (
                    ("factor", "factor"),
                    ("low_frequency", "low_freq_factor"),
                    ("high_frequency", "high_freq_factor"),
                    ("original_context", "original_max_position_embeddings"),
                )
            }
        rope.end()
        return RotaryOptions(**options)


# Weights.


class Names:
    """Where a parameter of ours is among theirs."""

    def __init__(self, config: ModelConfig, model_type: str, ours: Mapping[str, Any]):
        """`ours`: our parameters, or their shapes."""
        self.config, self.family = config, FAMILIES[model_type]
        self._shapes = {name: leaf.shape for name, leaf in ours.items()}

    def of(self, name: str) -> list[str]:
        """Their names of our parameter: one for each layer, or a single one."""
        module, _, leaf = name.removeprefix(LAYER).rpartition(".")
        if not name.startswith(LAYER):
            return [f"{self.family.top[module]}.{leaf}"]
        theirs = self.family.arrays.get(name.removeprefix(LAYER))
        theirs = f"{self.family.layer[module]}.{leaf}" if theirs is None else theirs
        return [f"{self.family.layers}.{i}.{theirs}" for i in self.layers(name)]

    def layers(self, name: str) -> list[int]:
        """The layers that have our parameter."""
        layers = range(self.config.n_layers)
        kind = name.removeprefix(LAYER).partition(".")[0]
        if self.config.attention_every is None or kind not in KINDS:
            return list(layers)
        every = int(self.config.attention_every.partition(":")[0])
        return [i for i in layers if ((i + 1) % every == 0) == (kind == "nth")]

    def view(self, name: str, theirs: np.ndarray) -> np.ndarray:
        """What our parameter is of one of their arrays."""
        theirs = theirs.T if self._swaps(name) else theirs
        module, _, leaf = name.removeprefix(LAYER).rpartition(".")
        if module in self.family.joined:
            before = self.family.joined[: self.family.joined.index(module)]
            start = sum(self._rows(other, leaf) for other in before)
            return theirs[start : start + self._rows(module, leaf)]
        if module in self.family.by_head:
            heads = (self.config.n_heads, len(self.family.by_head), -1, *theirs.shape[1:])
            return theirs.reshape(heads)[:, self.family.by_head.index(module)]
        return theirs[:, 0, -1 - int(leaf)] if leaf.isdigit() else theirs  # of a convolution

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of each of their arrays that have our parameter."""
        shape = self._shapes[name]
        shape = shape[1:] if name.startswith(LAYER) else shape
        module, _, leaf = name.removeprefix(LAYER).rpartition(".")
        for group in (self.family.joined, self.family.by_head):
            if module in group:
                shape = (sum(self._rows(other, leaf) for other in group), *shape[1:])
        if leaf.isdigit():
            size = sum(other.startswith(f"{LAYER}{module}.") for other in self._shapes)
            return (*shape, 1, size)
        return shape[::-1] if self._swaps(name) else shape

    def gain_offset(self, name: str) -> np.float32:
        """The number that they add to a parameter before they compute with it."""
        module, _, leaf = name.removeprefix(LAYER).rpartition(".")
        is_gain = self._is_norm(name) and leaf == "weight" and module not in self.family.plain
        return np.float32(self.family.gain_offset if is_gain else 0.0)

    def _rows(self, module: str, leaf: str) -> int:
        return self._shapes[f"{LAYER}{module}.{leaf}"][1]

    def _swaps(self, name: str) -> bool:
        """Whether their matrix is the transpose of ours."""
        return self.family.transposed and name.startswith("stack.") and not self._is_norm(name)

    def _is_norm(self, name: str) -> bool:
        return "norm" in name.rpartition(".")[0].rpartition(".")[2]


def import_arrays(names: Names, wanted: Mapping[str, Any], get: Any) -> dict[str, np.ndarray]:
    """Our parameters, in float32. `wanted` are shapes by our names; `get(name, shape)` returns
    theirs, which must have that shape."""
    weights = {}
    for name, leaf in wanted.items():
        layers, offset = [], names.gain_offset(name)
        shape = leaf.shape[1:] if name.startswith(LAYER) else leaf.shape
        for theirs in names.of(name):
            array = np.asarray(get(theirs, names.shape(name)), np.float32)
            layers.append(names.view(name, array).reshape(shape) + offset)
        weights[name] = np.stack(layers) if name.startswith(LAYER) else layers[0]
    return weights


def export_arrays(
    names: Names, ours: Mapping[str, np.ndarray], vocab_size: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Their parameters, by their names, from ours."""
    parts = collections.Counter(their for name in ours for their in names.of(name))
    begun: dict[str, np.ndarray] = {}
    for name, value in ours.items():
        shape = names.shape(name)
        if name in ("embedding.weight", "head.weight"):
            value, shape = value[:vocab_size], (vocab_size, *shape[1:])
        layers = value if name.startswith(LAYER) else [value]
        for their, array in zip(names.of(name), layers, strict=True):
            whole = begun.pop(their) if their in begun else np.empty(shape, value.dtype)
            view = names.view(name, whole)
            view[...] = (array - names.gain_offset(name)).reshape(view.shape)
            parts[their] -= 1
            if parts[their]:
                begun[their] = whole
            else:
                yield their, whole
    yield from _implied(names, ours)


def _implied(names: Names, ours: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters that theirs has, and ours does without."""
    config, prefix, kind = names.config, names.family.layers, names.family.model_type
    kinds = [""] if config.attention_every is None else [f"{layer}." for layer in KINDS]
    have_gains = kind in ("qwen3", "gemma3_text", "qwen3_5_text")
    for which, of_kind in itertools.product(("query", "key"), kinds) if have_gains else ():
        module = f"{of_kind}attention.heads.{which}_norm"
        if module not in names.family.layer or f"{LAYER}{module}.weight" in ours:
            continue
        for i in names.layers(LAYER + module):
            gain = np.full(config.d_head, 1 - names.family.gain_offset, np.float32)
            yield f"{prefix}.{i}.self_attn.{which[0]}_norm.weight", gain
    for i in range(config.n_layers):
        if kind == "qwen3" and split_options(config.mlp)[0] == "relu2":
            yield f"{prefix}.{i}.mlp.gate_proj.weight", ours["stack.blocks.mlp.up.weight"][i]
        if kind == "gpt2" and not config.bias:
            d, d_ff = config.d_model, config.d_hidden
            sizes = {"ln_1": d, "ln_2": d, "attn.c_attn": 3 * d, "attn.c_proj": d}
            have = {x for y, x in names.family.layer.items() if f"{LAYER}{y}.bias" in ours}
            for module, size in (sizes | {"mlp.c_fc": d_ff, "mlp.c_proj": d}).items():
                if module not in have:
                    yield f"{prefix}.{i}.{module}.bias", np.zeros(size, np.float32)
    if kind == "gpt2" and not config.bias:
        yield "transformer.ln_f.bias", np.zeros(config.d_model, np.float32)
