"""Losses of the same training on meshes of eight simulated devices, as JSON.

A program of its own, run by tests/test_sharding.py: the number of devices is chosen once a process.
"""

import dataclasses
import json
import re
import sys
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from conftest import GPT2, TINY, drawn
from jaxtyping import PRNGKeyArray

from gptlite.adapters import with_adapters
from gptlite.config import Config, ModelConfig, OptimizerConfig, TrainingConfig
from gptlite.estimate.program import COLLECTIVES
from gptlite.estimate.step import lower_step
from gptlite.family.seq2seq import Seq2Seq, shift_right
from gptlite.machine.mesh import make_mesh
from gptlite.machine.names import parse_lora
from gptlite.models.gpt import GPT
from gptlite.nn.kernels.rows import map_heads
from gptlite.runs.frozen import trainable
from gptlite.training.loss import cross_entropy, window_losses
from gptlite.training.step import TrainSteps

# data x fsdp x tensor; the first is what the others are compared with.
MESHES = [(1, 1, 1), (2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8)]
VOCAB, ROWS, STEPS = 16, 8, 20
SMALL = dataclasses.replace(TINY, n_heads=8, d_model=32, d_ff=32, dropout=0.1)
# Together, every block that has parameters.
MODELS = {
    "gpt2": GPT2
    | {
        "attention_dropout": 0.1,
        "attention": "full:qkv_bias=true",
        "mlp": "swiglu",
    },
    "experts": {
        "mlp": "moe:balance_loss=1.0",
        "norm": "dyt",
        "block": "sandwich",
        "positions": "relative",
        "attention": "full:qk_gain=true:output_bias=true",
        "n_kv_heads": 4,
        "embed_previous": 1,
        "stack": "scan",
    },
    "adapters": {"lora": "2:alpha=4", "separate_documents": True},
    "translation": {"dropout": 0.0, "mlp": "moe:balance_loss=1.0"},
}


def batch(step: int) -> np.ndarray:
    shape = (ROWS, SMALL.context_length + 1)
    return np.random.default_rng(step).integers(VOCAB, size=shape).astype(np.int32)


def translation(step: int) -> dict[str, np.ndarray]:
    """Targets of random lengths, 0 included."""
    random = np.random.default_rng(step)
    ids = random.integers(VOCAB, size=(ROWS, SMALL.context_length)).astype(np.int32)
    real = np.arange(ids.shape[1]) < random.integers(ids.shape[1], size=(ROWS, 1))
    source = np.where(real | (np.arange(ids.shape[1]) == 0), ids, -1)
    return {"source": source, "targets": ids, "real": real}


def translation_losses(model, batch, *, label_smoothing, key):
    source, targets = batch["source"], batch["targets"]
    inputs = shift_right(targets, 0)
    real = batch["real"]
    logits, aux_loss = model.with_aux_loss(
        jnp.maximum(source, 0),
        inputs,
        source_lengths=jnp.sum(source >= 0, axis=-1),
        lengths=jnp.sum(real, axis=-1),
        key=key,
    )
    return cross_entropy(logits, targets, label_smoothing), aux_loss


def language_model(config: ModelConfig, key: PRNGKeyArray) -> GPT:
    separator = 0 if config.separate_documents else None
    model = GPT(config, VOCAB - 3, padded_vocab_size=VOCAB, separator=separator, key=key)
    if config.lora is None:
        return model
    return with_adapters(model, parse_lora(config.lora), key=key)


def train(
    name: str,
    optimizer: Literal["adamw", "muon"],
    mesh: tuple[int, int, int],
    steps: int = STEPS,
    parts: int = 1,
    count: int | None = None,
) -> list[float]:
    """The losses of a training of `steps` steps, of which `count` are made. Batches come again
    after two, so there is something to learn."""
    config = dataclasses.replace(SMALL, **MODELS[name])
    if name.startswith("translation"):
        model = drawn(lambda key: Seq2Seq(config, VOCAB, VOCAB, key=key), 0.7)
        options: dict[str, Any] = {
            "loss_fn": translation_losses,
            "loss_mask": lambda batch: batch["real"],
        }
        batches = [translation(step % 2) for step in range(steps)]
    else:
        model = drawn(lambda key: language_model(config, key), 0.7)
        batches = [np.minimum(batch(step % 2), VOCAB - 4) for step in range(steps)]
        whole = Config(model=config, training=TrainingConfig(init_from="another run"))
        options = {"loss_fn": window_losses, "trainable": trainable(whole, model)}
    rule = OptimizerConfig(
        name=optimizer, learning_rate=3e-3, adam_learning_rate=3e-3, clip_norm=1.0
    )
    training = TrainingConfig(
        steps=steps, batch_size=ROWS, accumulation=parts, compute_dtype="float32"
    )
    data, fsdp, tensor = mesh
    devices = jax.devices()[: data * fsdp * tensor]
    found = make_mesh(fsdp=fsdp, tensor=tensor, devices=devices)
    train_steps = TrainSteps(model, rule, training, found, **options)
    state = train_steps.init(model)
    placed = [x.sharding for x in jax.tree.leaves(eqx.filter(state, eqx.is_array))]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    state, metrics = train_steps(state, stacked, steps if count is None else count)
    after = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    for sharding, x in zip(placed, after, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), "an array lies elsewhere after a step"
    return np.asarray(metrics.loss)[:count].tolist()


def compile_step(
    mesh: tuple[int, int, int], name: Literal["adamw", "muon"] = "adamw"
) -> dict[str, int]:
    """Of a step of a model whose activations outweigh its parameters: temporary memory a device, in
    bytes, and how many collectives of each kind there are."""
    config = dataclasses.replace(
        TINY, n_layers=2, n_heads=4, d_model=64, context_length=64, embed_previous=0
    )
    model = drawn(lambda key: GPT(config, 64, key=key))
    rule = OptimizerConfig(name=name)
    training = TrainingConfig(steps=1, batch_size=64, compute_dtype="float32")
    _, fsdp, tensor = mesh
    train_steps = TrainSteps(model, rule, training, make_mesh(fsdp=fsdp, tensor=tensor))
    compiled = lower_step(train_steps, model, 64).compile()
    program: Any = compiled.as_text()
    memory: Any = compiled.memory_analysis()
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", program)) for name in COLLECTIVES}
    return counts | {"temporary": memory.temp_size_in_bytes}


def map_over_heads() -> dict[str, Any]:
    """What devices get of 8 rows, 4 heads and 2 heads of keys on the mixed mesh, and the greatest
    difference of the results from those of one device."""
    shapes = []

    def scores(query, key):
        shapes.append([query.shape, key.shape])
        grouped = query.reshape(*key.shape[:2], -1, query.shape[-1])
        return (grouped @ jnp.swapaxes(key, -1, -2)).reshape(*query.shape[:-1], -1)

    query = jax.random.normal(jax.random.key(0), (8, 4, 5, 3))
    key = jax.random.normal(jax.random.key(1), (8, 2, 6, 3))
    with jax.set_mesh(make_mesh(data=2, fsdp=2, tensor=2)):
        found = jax.jit(lambda query, key: map_heads(scores, query, key))(query, key)
    return {
        "shapes": shapes,
        "difference": float(np.max(np.abs(np.asarray(found) - scores(query, key)))),
    }


def main() -> None:
    assert jax.device_count() == 8
    found: dict[str, list[float]] = {}
    cases: list[tuple[str, Literal["adamw", "muon"], int, list[tuple[int, int, int]]]] = [
        ("gpt2", "adamw", 100, MESHES),
        ("gpt2", "muon", STEPS, MESHES[:2]),
        ("experts", "adamw", STEPS, MESHES[:2]),
        ("adapters", "adamw", STEPS, MESHES[:2]),
        ("translation", "adamw", STEPS, MESHES[:2]),
    ]
    for name, optimizer, steps, meshes in cases:
        for mesh in meshes:
            # To the end on two of them, which takes long.
            count = None if mesh in ((1, 1, 1), (8, 1, 1)) else STEPS
            found[f"{name} {optimizer} {mesh}"] = train(name, optimizer, mesh, steps, count=count)
    found["parts 4"] = train("translation", "adamw", (2, 1, 1), parts=4)
    compiled = {str(mesh): compile_step(mesh) for mesh in MESHES[1:4]}
    compiled["muon"] = compile_step((1, 8, 1), "muon")
    json.dump({"losses": found, "compiled": compiled, "heads": map_over_heads()}, sys.stdout)


if __name__ == "__main__":
    main()
