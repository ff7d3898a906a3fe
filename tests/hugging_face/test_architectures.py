"""Models both ways between gptlite and transformers: the same logits."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TEXT, drawn, needs
from hypothesis import given, settings, strategies as st

from gptlite.cli import parse_train
from gptlite.config import Config, ModelConfig, SamplingConfig
from gptlite.errors import UserError
from gptlite.generation.generate import generate
from gptlite.hugging_face.architectures import (
    OLD_NAMES,
    Names,
    export_arrays,
    from_hf_config,
    to_hf_config,
)
from gptlite.hugging_face.folder import export_run, load_hf
from gptlite.machine.names import split_options
from gptlite.models.build import find_part
from gptlite.models.gpt import GPT
from gptlite.nn.attention import AttentionOptions
from gptlite.nn.stack import unstacked
from gptlite.runs.model import make_model
from gptlite.runs.run import Run
from gptlite.runs.tokenizers import make_tokenizer
from gptlite.runs.weights import named_arrays, named_leaves
from gptlite.text.corpus import text_corpus

TOKENIZER = make_tokenizer("char", text_corpus(TEXT))
VOCAB = TOKENIZER.vocab_size
# float32 on both sides, sums in different orders. The logits are of size 1 to 3.
TOLERANCE = 1e-4
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 72,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16}
QWEN3_5 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
# model_type and fields of models that are imported.
IMPORTED = {
    "gpt2": (
        "gpt2",
        {
            "vocab_size": VOCAB,
            "n_positions": 72,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
    "llama": ("llama", SHAPE | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
    "llama, scaled": ("llama", SHAPE | {"head_dim": 16, "rope_parameters": LLAMA3}),
    "llama, biases": ("llama", SHAPE | {"attention_bias": True, "mlp_bias": True}),
    "llama, biases of attention": ("llama", SHAPE | {"attention_bias": True}),
    "qwen3": ("qwen3", SHAPE | {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "qwen2": ("qwen2", SHAPE | {"tie_word_embeddings": True}),
    "mistral": ("mistral", SHAPE | {"sliding_window": 5}),
    "arcee": ("arcee", SHAPE),
    "qwen3.5": ("qwen3_5_text", SHAPE | QWEN3_5),
    "qwen3.5, every second layer": (
        "qwen3_5_text",
        SHAPE
        | QWEN3_5
        | {"layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"]}
        | {"num_hidden_layers": 5, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "gemma3_text",
        SHAPE
        | GEMMA
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}
        | {"num_hidden_layers": 5, "sliding_window": 4},
    ),
    "gemma3, sliding": (
        "gemma3_text",
        SHAPE | GEMMA | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
    ),
}
BASE: Any = {
    "n_layers": 2,
    "n_heads": 4,
    "d_model": 32,
    "d_ff": 48,
    "context_length": 72,
    "embed_previous": 0,
}
NO_QK: Any = {"qk_norm": False}
# The architecture, and changes of the config.
EXPORTED: dict[str, tuple[str, Any]] = {
    "relu2": ("qwen3", {}),
    "relu2, no QK-norm": ("arcee", NO_QK),
    "gelu": ("arcee", NO_QK | {"mlp": "gelu", "n_kv_heads": 2}),
    "swiglu, window": (
        "qwen3",
        {
            "mlp": "swiglu",
            "n_kv_heads": 2,
            "head_size": 16,
            "norm": "rms:eps=1e-5",
            "attention": "sliding:window=5:qk_eps=1e-5",
        },
    ),
    "gains and biases": (
        "qwen3",
        {"mlp": "geglu", "attention": "full:qk_gain=true:qkv_bias=true:output_bias=true"},
    ),
    "llama": (
        "llama",
        NO_QK
        | {
            "mlp": "swiglu",
            "tied_head": True,
            "positions": "rotary:theta=500000:factor=8:original_context=16",
        },
    ),
    "llama, biases": ("llama", NO_QK | {"mlp": "swiglu", "bias": True}),
    "qwen2": ("qwen2", NO_QK | {"mlp": "swiglu", "attention": "full:qkv_bias=true"}),
    "mistral": ("mistral", NO_QK | {"mlp": "swiglu", "attention": "sliding:window=7"}),
    "gemma3": (
        "gemma3_text",
        {"mlp": "geglu", "block": "sandwich", "scale_embedding": True, "logit_cap": 4.0},
    ),
    "gemma3, two kinds": (
        "gemma3_text",
        {
            "n_layers": 3,
            "mlp": "geglu",
            "block": "sandwich",
            "scale_embedding": True,
            "attention": "sliding:window=5:theta=50",
            "attention_every": "2:full",
        },
    ),
    "gemma3, theta and gains of every second layer": (
        "gemma3_text",
        {
            "mlp": "geglu",
            "block": "sandwich",
            "scale_embedding": True,
            "attention": "sliding:window=4",
            "attention_every": "2:full:theta=50:qk_gain=true",
        },
    ),
    "gpt2, biases of queries, keys and values": (
        "gpt2",
        NO_QK | {"norm": "layer", "positions": "learned", "attention": "full:qkv_bias=true"},
    ),
    "gpt2": (
        "gpt2",
        NO_QK
        | {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "tied_head": True},
    ),
    "qwen3.5": (
        "qwen3_5_text",
        {
            "mlp": "swiglu",
            "attention": "gated_deltanet:conv=3:heads=2",
            "attention_every": "2:gated",
            "positions": "rotary:share=0.5",
        },
    ),
    "gpt2, no biases": (
        "gpt2",
        NO_QK | {"norm": "layer", "positions": "learned", "mlp": "relu2"},
    ),
}
IDS = np.random.default_rng(0).integers(0, VOCAB, (3, 40))
GREEDY = SamplingConfig(greedy=True)


def theirs_of(kind: str, fields: dict[str, Any]) -> Any:
    """A model of transformers, moved away from ones and zeros, so that nothing goes unnoticed."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def load_theirs(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def logits_of(theirs: Any, ids: np.ndarray, **more: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return theirs(torch.tensor(ids), **more).logits.numpy()


@eqx.filter_jit
def logits(model, ids):
    return model(ids)


def check_equal(model: Any, theirs: Any) -> None:
    """Logits of whole sequences, one by one from a cache, and of a batch of different lengths; and
    the same greedy text."""
    import torch

    wanted = logits_of(theirs, IDS)
    assert np.abs(wanted).max() > 0.3
    np.testing.assert_allclose(logits(model, jnp.asarray(IDS)), wanted, atol=TOLERANCE)

    model = unstacked(model)
    cache, rows = model.init_cache((3,)), []
    extend = eqx.filter_jit(lambda model, ids, cache: model.extend(ids, cache))
    for token in IDS.T[:12]:
        hidden, cache = extend(model, jnp.asarray(token[:, None]), cache)
        rows.append(model.logits(hidden))
    one_by_one = jnp.concatenate(rows, axis=1)
    np.testing.assert_allclose(one_by_one, wanted[:, :12], atol=TOLERANCE)

    lengths = np.array([40, 3, 17])
    padded, mask = np.zeros_like(IDS), np.zeros_like(IDS)
    for row, length in enumerate(lengths):  # theirs are padded on the left
        padded[row, 40 - length :], mask[row, 40 - length :] = IDS[row, :length], 1
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    last = logits_of(
        theirs,
        padded,
        attention_mask=torch.tensor(mask),
        position_ids=torch.tensor(positions),
    )[:, -1]
    hidden, _ = eqx.filter_jit(lambda m, *given: m.extend(given[0], m.init_cache((3,)), given[1]))(
        model, jnp.asarray(IDS), jnp.asarray(lengths)
    )
    ours = model.logits(hidden)[np.arange(3), lengths - 1]
    np.testing.assert_allclose(ours, last, atol=TOLERANCE)

    prompt, keys = IDS[:1, :8], jax.random.split(jax.random.key(0), 1)
    real = torch.ones_like(torch.tensor(prompt))
    text = theirs.generate(
        torch.tensor(prompt), attention_mask=real, max_new_tokens=64, do_sample=False
    )
    new = generate(model, jnp.asarray(prompt), 64, GREEDY, keys=keys)
    assert new[0].tolist() == text[0, 8:].tolist()


def save(theirs: Any, folder: Path, **options: Any) -> None:
    theirs.save_pretrained(folder, **options)
    model = drawn(lambda key: make_model(ModelConfig(**BASE), TOKENIZER, key=key))
    export_run(Run(folder, Config(model=ModelConfig(**BASE)), TOKENIZER, model), folder / "other")
    (folder / "other" / "tokenizer.json").rename(folder / "tokenizer.json")


@needs("torch", "transformers")
@pytest.mark.parametrize("name", IMPORTED)
def test_an_imported_model_gives_the_same_logits(name, tmp_path):
    theirs = theirs_of(*IMPORTED[name])
    save(theirs, tmp_path)
    run = load_hf(str(tmp_path))
    check_equal(run.model, theirs)
    export_run(run, tmp_path / "again")
    again = load_theirs(tmp_path / "again").state_dict()
    for key, value in theirs.state_dict().items():
        # Gemma and Qwen 3.5 store gains minus 1, which rounds.
        rtol = 1e-6 if name.startswith(("gemma", "qwen3.5")) else 0
        np.testing.assert_allclose(again[key], value, rtol=rtol, atol=rtol, err_msg=key)


@needs("torch", "transformers")
@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_model_gives_the_same_logits_and_comes_back(name, tmp_path):
    architecture, changes = EXPORTED[name]
    config = ModelConfig(**BASE | changes)
    model = drawn(lambda key: make_model(config, TOKENIZER, key=key))
    export_run(Run(tmp_path, Config(model=config), TOKENIZER, model), tmp_path / "out")
    theirs = load_theirs(tmp_path / "out")
    assert theirs.config.model_type == architecture
    check_equal(model, theirs)
    back = load_hf(str(tmp_path / "out"))
    assert back.config.model == config
    found, wanted = named_arrays(back.model), named_arrays(model)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if architecture in ("gemma3_text", "qwen3_5_text") and "norm" in key:
            np.testing.assert_allclose(found[key], value, atol=1e-6)
        else:
            np.testing.assert_array_equal(found[key], value)


@needs("torch", "transformers")
@pytest.mark.parametrize("tied", [True, False])
def test_the_language_model_of_one_that_sees_pictures_is_imported(tied, tmp_path):
    import torch
    import transformers

    torch.manual_seed(0)
    seeing = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    config = transformers.AutoConfig.for_model(
        "qwen3_5",
        text_config=SHAPE | QWEN3_5,
        vision_config=seeing | {"out_hidden_size": 32},
        tie_word_embeddings=tied,
    )
    theirs = transformers.AutoModelForImageTextToText.from_config(config).eval()
    save(theirs, tmp_path)
    run = load_hf(str(tmp_path))
    assert run.config.model.tied_head == tied
    wanted = logits_of(theirs, IDS)
    np.testing.assert_allclose(logits(run.model, jnp.asarray(IDS)), wanted, atol=TOLERANCE)


@needs("torch", "transformers")
def test_half_precision_and_several_files_are_read(tmp_path):
    import torch

    for dtype in (torch.bfloat16, torch.float16):
        theirs = theirs_of(*IMPORTED["qwen3"]).to(dtype)
        folder = tmp_path / str(dtype)
        save(theirs, folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").exists()
        run = load_hf(str(folder))
        wanted = logits_of(load_theirs(folder), IDS)
        np.testing.assert_allclose(logits(run.model, jnp.asarray(IDS)), wanted, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba': gptlite has llama"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': gptlite has silu, gelu_pytorch_tanh"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rope_parameters.rope_type is 'yarn': gptlite has 'default' or 'llama3' only",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            r"partial_rotary_factor is 0\.5",
        ),
        ({"rope_interleaved": True}, "field rope_interleaved, True, that gptlite does not know"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a whole number from 1 to"),
        ({"num_hidden_layers": math.inf}, "num_hidden_layers must be a whole number from 1 to"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number, got 'nan'"),
        ({"rms_norm_eps": 0}, r"The model's rms_norm_eps must be above 0"),
        ({"rope_theta": 0}, r"The model's rope_parameters.rope_theta must be above 1"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 0,
                }
            },
            r"rope_parameters.original_max_position_embeddings must be at least 1",
        ),
        ({"hidden_act": ["silu"]}, "hidden_act must be of type str, got"),
        ({"rope_parameters": 3}, "rope_parameters must be of type dict, got '3'"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"vocab_size": 10**400}, "vocab_size must be a whole number from 1"),
        (
            {"hidden_size": None},
            "hidden_size must be a whole number from 1 to .*, got 'None'",
        ),
    ],
)
def test_what_gptlite_does_not_have_is_refused_by_its_field(fields, words, tmp_path):
    config = {"model_type": "llama", **SHAPE, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        load_hf(str(tmp_path))


@pytest.mark.parametrize(("value", "wanted"), [(1, True), (1.0, True), (0, False), (-0.0, False)])
def test_a_number_that_is_true_or_false_is_that(value, wanted):
    fields = {"model_type": "llama", **SHAPE}
    for name in ("attention_bias", "tie_word_embeddings"):
        found, same = (from_hf_config(fields | {name: x}) for x in (value, wanted))
        assert found == same
        assert repr(found) == repr(same)


# Fields of rotary positions as they were and are written, and the theta that they mean.
ROPE = {
    "nothing": ({}, 1e4),
    "at the top": ({"rope_theta": 5e5}, 5e5),
    "inside": ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, 2e4),
    "type inside, theta at the top": (
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
        5e5,
    ),
    "empty": ({"rope_parameters": {}, "rope_theta": 5e5}, 5e5),
    "scaling first": (
        {"rope_scaling": {"type": "default", "rope_theta": 3e4}, "rope_parameters": {}},
        3e4,
    ),
    "both": (
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 9.0}},
        1e4,
    ),
}
ALL_FULL = {"layer_types": ["full_attention"] * 2}
ALL_SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
GEMMA_ROPE = {
    "full": (ALL_FULL, 1e6),
    "sliding": (ALL_SLIDING, 1e4),
    "few layers": ({"sliding_window": 5}, 1e4),
    "full, old": (ALL_FULL | {"rope_theta": 5e5, "rope_local_base_freq": 3.0}, 5e5),
    "sliding, old": (ALL_SLIDING | {"rope_theta": 5e5, "rope_local_base_freq": 300.0}, 300.0),
}


@needs("transformers")
@pytest.mark.parametrize(
    ("kind", "fields", "theta"),
    [("llama", *case) for case in ROPE.values()]
    + [("gemma3_text", GEMMA | fields, theta) for fields, theta in GEMMA_ROPE.values()],
    ids=[*ROPE, *(f"gemma3 {name}" for name in GEMMA_ROPE)],
)
def test_old_and_new_fields_of_rotary_positions_mean_what_they_do_in_transformers(
    kind, fields, theta
):
    from transformers import AutoConfig

    ours = from_hf_config({"model_type": kind, **SHAPE, **fields})
    _, options = split_options(ours.positions)
    theirs: Any = AutoConfig.for_model(kind, **json.loads(json.dumps(SHAPE | fields)))
    rope = theirs.rope_parameters
    if kind == "gemma3_text":
        rope = rope[theirs.layer_types[0]]
    assert float(options.get("theta", 1e4)) == rope["rope_theta"] == theta


def test_a_scaling_that_gptlite_lacks_is_refused_wherever_it_stands():
    linear = {"rope_type": "linear", "factor": 2.0}
    for kind, fields in (
        ("llama", {"rope_scaling": linear, "rope_parameters": {"rope_type": "default"}}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("gemma3_text", GEMMA | ALL_FULL | {"rope_scaling": linear}),
    ):
        with pytest.raises(UserError, match="rope_type is 'linear'"):
            from_hf_config({"model_type": kind, **SHAPE, **fields})
    with pytest.raises(UserError, match=r"partial_rotary_factor is 0\.5"):
        from_hf_config({"model_type": "llama", **SHAPE, "partial_rotary_factor": 0.5})
    with pytest.raises(UserError, match="field rope_type"):
        from_hf_config({"model_type": "gemma3_text", **SHAPE, **GEMMA, "rope_parameters": linear})


KINDS_READ = ["llama", "mistral", "qwen2", "qwen3", "arcee", "qwen3_5_text", "gemma3_text"]


@needs("transformers")
@pytest.mark.parametrize("kind", KINDS_READ)
def test_an_absent_field_means_what_it_does_in_transformers(kind):
    from transformers import AutoConfig

    given = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "num_attention_heads": 64,
        "intermediate_size": 8,
    }
    given |= {"max_position_embeddings": 9, "num_hidden_layers": 4}
    ours = from_hf_config({"model_type": kind, **given})
    theirs: Any = AutoConfig.for_model(kind, **given)
    # (Without `num_key_value_heads`, a llama has as many as there are heads.)
    assert (ours.n_kv_heads or ours.n_heads) == theirs.num_key_value_heads
    assert ours.d_head == (getattr(theirs, "head_dim", None) or 4)
    assert float(split_options(ours.norm)[1].get("eps", 1e-6)) == theirs.rms_norm_eps
    window = theirs.sliding_window if kind in ("mistral", "gemma3_text") else None
    assert split_options(ours.attention)[1].get("window") == (str(window) if window else None)
    assert ours.tied_head == theirs.tie_word_embeddings


@needs("transformers")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window_pattern": 4, "rope_theta": 5e5, "rope_local_base_freq": 300.0},
        {"layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 4},
    ],
    ids=str,
)
def test_the_layers_of_gemma_are_those_of_transformers(fields):
    from transformers import AutoConfig

    fields = SHAPE | GEMMA | {"num_hidden_layers": 12} | fields
    ours = from_hf_config({"model_type": "gemma3_text", **fields})
    theirs: Any = AutoConfig.for_model("gemma3_text", **json.loads(json.dumps(fields)))
    every, _, full = str(ours.attention_every).partition(":")
    for i, kind in enumerate(theirs.layer_types):
        is_nth = (i + 1) % int(every) == 0
        name, options = split_options(full if is_nth else ours.attention)
        theta = options.get("theta", split_options(ours.positions)[1].get("theta", 1e4))
        assert f"{name}_attention" == kind
        assert float(theta) == theirs.rope_parameters[kind]["rope_theta"]
        assert options.get("window") == (None if is_nth else str(theirs.sliding_window))


def test_layers_of_gemma_are_read_by_programs_that_know_a_pattern_alone():
    gemma = BASE | {"mlp": "geglu", "block": "sandwich", "scale_embedding": True, "n_layers": 7}
    for attention, every, pattern in (
        *(("full", None, 1), ("sliding", None, 8)),
        *(("sliding:theta=50", "3:full", 3), ("sliding", "7:full:theta=50", 7)),
    ):
        config = ModelConfig(**gemma | {"attention": attention, "attention_every": every})
        fields = to_hf_config(config, VOCAB)
        assert fields["sliding_window_pattern"] == pattern
        for name in ("gptlite", "layer_types"):
            del fields[name]
        assert meaning(from_hf_config(fields)) == meaning(config)


def test_layers_of_gemma_that_are_no_pattern_are_refused():
    fields = {"model_type": "gemma3_text", **SHAPE, **GEMMA, "num_hidden_layers": 4}
    mixed = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    with pytest.raises(UserError, match="must be sliding_attention, but for every Nth layer"):
        from_hf_config(fields | {"layer_types": mixed})
    scaled = {"full_attention": LLAMA3, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(UserError, match="rope_parameters of sliding_attention must be those of"):
        from_hf_config(fields | {"sliding_window_pattern": 2, "rope_parameters": scaled})
    with pytest.raises(UserError, match=r"sliding_window must be a whole number .* got 'None'"):
        from_hf_config(fields | {"sliding_window": None})
    with pytest.raises(UserError, match="rope_local_base_freq must be above 1"):
        from_hf_config(fields | {"rope_local_base_freq": 0.5})
    for uses in (False, True):
        assert from_hf_config(fields | {"use_sliding_window": uses}) == from_hf_config(fields)


def test_a_window_that_is_null_is_none():
    fields = {**SHAPE, "use_sliding_window": True, "sliding_window": None}
    for kind in ("qwen2", "qwen3"):
        assert "sliding" not in str(from_hf_config({"model_type": kind, **fields}).attention)


def test_sizes_are_written_as_they_are_built():
    changes = {"mlp": "swiglu", "attention_every": "2:gated"}
    config = ModelConfig(**BASE | changes | {"attention": "gated_deltanet:heads=+2:conv=1_6"})
    fields = to_hf_config(config, VOCAB)
    assert (fields["linear_num_value_heads"], fields["linear_conv_kernel_dim"]) == (2, 16)
    config = dataclasses.replace(config, attention="gated_deltanet:heads=2:negative=true")
    with pytest.raises(UserError, match=r"\(--model\.attention gated_deltanet:heads=2\)"):
        to_hf_config(config, VOCAB)


def test_fields_that_change_nothing_are_passed_over():
    notes = {"unsloth_fixed": True, "predict_special_tokens": True, "output_past": True}
    notes |= {"tokenizer_class": "X", "max_length": 20, "temperature": 0.7, "num_labels": 2}
    fields = {"model_type": "llama", **SHAPE}
    assert from_hf_config(fields | notes | {"partial_rotary_factor": 1.0}) == from_hf_config(fields)


def test_layers_that_differ_are_refused():
    fields = {"model_type": "qwen3", **SHAPE, "use_sliding_window": True, "sliding_window": 5}
    mixed = ["full_attention", "sliding_attention"]
    with pytest.raises(UserError, match="layer_types differ"):
        from_hf_config(fields | {"layer_types": mixed})
    with pytest.raises(UserError, match="layer_types differ"):
        from_hf_config(fields | {"max_window_layers": 1})


def test_what_no_architecture_has_is_refused_all_at_once():
    changes = {"positions": "alibi", "norm": "dyt"}
    config = ModelConfig(**BASE | changes | {"embed_previous": 2, "block": "parallel"})
    with pytest.raises(UserError) as error:
        to_hf_config(config, VOCAB)
    for words in (
        *("--model.embed-previous 0", "norm dyt (--model.norm rms)"),
        *("positions alibi (--model.positions rotary)", "block parallel (--model.block pre)"),
    ):
        assert words in str(error.value)
    model = parse_train(["--model.no-qk-norm", "--model.no-bias", "--model.no-scale-embedding"])
    assert not model.config.model.qk_norm


@pytest.mark.parametrize(
    "changes",
    [NO_QK | {"mlp": "swiglu"}, NO_QK, {"block": "sandwich", "mlp": "geglu"}],
    ids=str,
)
def test_a_width_that_transformers_refuses_is_refused(changes):
    config = ModelConfig(**BASE | {"n_heads": 3, "head_size": 8} | changes)
    with pytest.raises(UserError, match=r"a width of \d+ with 3 heads here \(--model\.d-model, a"):
        to_hf_config(config, VOCAB)


def test_a_model_may_lie_in_the_home_folder(tmp_path, monkeypatch):
    config = ModelConfig(**BASE | NO_QK)
    model = drawn(lambda key: make_model(config, TOKENIZER, key=key))
    export_run(Run(tmp_path, Config(model=config), TOKENIZER, model), tmp_path / "out")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = named_arrays(load_hf("~/out").model)
    for key, value in named_arrays(model).items():
        np.testing.assert_array_equal(found[key], value)


@pytest.mark.parametrize("block", ["pre", "sandwich"])
def test_programs_that_know_the_old_fields_of_rotary_positions_find_them(block):
    scaled = "rotary:theta=500:factor=4:low_frequency=1:high_frequency=4:original_context=16"
    of_block = {"mlp": "geglu", "scale_embedding": True, "block": "sandwich"}
    changes = of_block if block == "sandwich" else NO_QK | {"mlp": "swiglu"}
    for positions, kind in (("rotary:theta=500", None), (scaled, "llama3")):
        config = ModelConfig(**BASE | changes | {"positions": positions})
        fields = to_hf_config(config, VOCAB)
        assert fields["rope_theta"] == 500
        assert (fields["rope_scaling"] or {}).get("rope_type") == kind
        assert ("rope_local_base_freq" in fields) == (block == "sandwich")
        assert from_hf_config(fields) == config
        for name in OLD_NAMES & fields.keys():  # as `transformers` writes it again
            del fields[name]
        assert from_hf_config(fields) == config
        fields = to_hf_config(config, VOCAB)
        del fields["rope_parameters"]
        found = from_hf_config(fields)
        assert find_part("positions", found)[1] == find_part("positions", config)[1]


CHOICES = {
    "block": ["pre", "post", "sandwich", "parallel"],
    "norm": ["rms", "layer", "dyt", "rms:eps=0.001"],
    "attention": [
        *("full", "sliding", "full:qkv_bias=true", "gated_deltanet:negative=true"),
        *("sliding:theta=50",),
        *("sliding:output_bias=true", "full:qk_eps=0.1", "sliding:window=5:qk_gain=true"),
    ],
    "mlp": ["gelu", "relu2", "swiglu", "geglu", "moe"],
    "positions": [
        *("rotary", "learned", "alibi", "none"),
        *("rotary:theta=100:share=0.5", "rotary:theta=100:factor=8.0"),
    ],
    "embed_previous": [0, 2],
    "n_kv_heads": [None, 1],
    "attention_every": [None, None, "2:full:theta=50", "2:full", "2:gated:qk_gain=true"],
    "head_size": [None, 6],
    "logit_cap": [None, 15.0],
    **{name: [True, False] for name in ("scale_embedding", "qk_norm", "bias", "tied_head")},
}


def meaning(config: ModelConfig) -> list[Any]:
    """What attention computes, in each kind of layers."""
    found: list[Any] = [str(config.attention_every).partition(":")[0]]
    names = [config.attention]
    if config.attention_every is not None:
        names.append(config.attention_every.partition(":")[2])
    for name in names:
        kind = dataclasses.replace(config, attention=name)
        options = find_part("attention", kind)[1].get("options", AttentionOptions())
        positions = find_part("positions", kind)[1]["options"]
        changes = {
            "theta": options.theta or positions.theta,
            "qkv_bias": config.bias or options.qkv_bias,
            "output_bias": config.bias or options.output_bias,
            "qk_gain": False,  # one that is not there is 1
            "qk_eps": options.qk_eps if config.qk_norm else None,
        }
        rotary = dataclasses.replace(positions, theta=changes["theta"])
        found.append((split_options(name)[0], vars(options) | changes, rotary))
    return found


def exportable(fields: dict[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """The config to which the options lead that refusals name, and what is written of it."""
    fields, found = dict(fields), ""
    for _ in range(4):
        config = ModelConfig(n_heads=4, d_model=32, **fields)
        try:
            return config, to_hf_config(config, VOCAB)
        except UserError as error:
            found = str(error)
        # Of each bracket the first option, as train.py reads it.
        options = re.findall(r"\((without )?--model\.(no-)?([\w-]+)(?: ([\w:=.-]+))?", found)
        assert options, found
        named = [option for _, _, option, _ in options]
        assert len(named) == len(set(named)), found
        for without, no, option, value in options:
            name = option.replace("-", "_")
            assert (value == "") == (without != "" or isinstance(fields[name], bool)), found
            chosen = int(value) if value.isdigit() else value
            fields[name] = None if without else not no if value == "" else chosen
    pytest.fail(f"still refused: {found}")


chosen = given(st.fixed_dictionaries({name: st.sampled_from(x) for name, x in CHOICES.items()}))


@settings(max_examples=300)
@chosen
def test_the_options_that_a_refusal_names_lead_to_a_model_that_can_be_exported(fields):
    config, written = exportable(fields)
    assert from_hf_config(written) == config
    # Who does not know our config reads the same attention, also from the fields that programs knew
    # before there were lists of layers.
    for without in ({"gptlite"}, {"gptlite", "layer_types"}):
        fields = {name: x for name, x in written.items() if name not in without}
        if fields.get("hidden_act") == "relu":  # as a gate
            with pytest.raises(UserError, match="hidden_act is 'relu'"):
                from_hf_config(fields)
        elif written["model_type"] != "gpt2":
            assert meaning(from_hf_config(fields)) == meaning(config)


@settings(max_examples=60)
@chosen
def test_each_tensor_is_exported_once(fields):
    config, written = exportable(fields)
    try:
        model = eqx.filter_eval_shape(lambda key: GPT(config, VOCAB, key=key), jax.random.key(0))
    except UserError:  # options that no model has, such as qk_gain without qk_norm
        return
    leaves = named_leaves(model)
    zeros = {name: np.zeros(x.shape, np.float32) for name, x in leaves.items()}
    names = Names(config, written["model_type"], leaves)
    found = [name for name, _ in export_arrays(names, zeros, VOCAB)]
    assert len(found) == len(set(found))


def test_one_file_is_read_rather_than_an_index_as_in_transformers(tmp_path):
    import safetensors.numpy

    config = ModelConfig(**BASE | NO_QK | {"mlp": "swiglu"})
    model = drawn(lambda key: make_model(config, TOKENIZER, key=key))
    export_run(Run(tmp_path, Config(model=config), TOKENIZER, model), tmp_path / "out")
    arrays = safetensors.numpy.load((tmp_path / "out" / "model.safetensors").read_bytes())
    other = {name: 2 * array for name, array in arrays.items()}
    (tmp_path / "out" / "other.safetensors").write_bytes(safetensors.numpy.save(other))
    index = {"weight_map": dict.fromkeys(arrays, "other.safetensors")}
    (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps(index))
    for factor in (1, 2):
        run = load_hf(str(tmp_path / "out"))
        np.testing.assert_array_equal(run.model.norm.weight, factor * model.norm.weight)
        (tmp_path / "out" / "model.safetensors").unlink(missing_ok=True)
    for name in ("../other.bin", "../other.safetensors", "\0.safetensors", "\ud800.safetensors"):
        index = {"weight_map": dict.fromkeys(arrays, name)}
        (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match=r"must be of names to \.safetensors files"):
            load_hf(str(tmp_path / "out"))


def test_a_tensor_without_a_place_is_refused(tmp_path):
    """Also one that ours does without, if it is not what ours computes with."""
    import safetensors.numpy

    config = ModelConfig(**BASE)
    model = drawn(lambda key: make_model(config, TOKENIZER, key=key))
    export_run(Run(tmp_path, Config(model=config), TOKENIZER, model), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    arrays = safetensors.numpy.load(file.read_bytes())
    for name, change in (
        ("model.layers.0.self_attn.q_norm.weight", 1.5),
        ("model.layers.1.mlp.gate_proj.weight", 2.0),
        ("model.layers.1.mlp.extra.weight", 1.0),
        ("model.layers.0.xattn.bias", 1.0),
    ):
        changed = arrays | {name: change * arrays.get(name, np.ones(3, np.float32))}
        file.write_bytes(safetensors.numpy.save(changed))
        with pytest.raises(UserError, match=f"{name}, which gptlite has no place for"):
            load_hf(str(tmp_path / "out"))
    assert not math.isnan(arrays["model.norm.weight"].sum())
    del arrays["model.norm.weight"]
    file.write_bytes(safetensors.numpy.save(arrays))
    with pytest.raises(UserError, match=r"lack model\.norm\.weight"):
        load_hf(str(tmp_path / "out"))


def test_a_config_that_was_edited_after_the_export_is_read_anew():
    fields = json.loads(json.dumps(to_hf_config(ModelConfig(**BASE | NO_QK), VOCAB)))
    assert from_hf_config(fields) == ModelConfig(**BASE | NO_QK)
    with pytest.raises(UserError, match="rope_type is 'linear'"):
        from_hf_config(fields | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    with pytest.raises(UserError, match="a field quantization_config"):
        from_hf_config(fields | {"quantization_config": {"bits": 4}})
    fields["rms_norm_eps"] = 1e-3
    assert from_hf_config(fields).norm == "rms:eps=0.001"
    assert dataclasses.replace(from_hf_config(fields), norm="rms").d_ff == 48
