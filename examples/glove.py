"""A model of words that starts from, or is frozen to, word vectors in GloVe's text format.

    python examples/glove.py

The file of vectors is made here, from co-occurrence counts within 4 words in the training text:
positive pointwise mutual information and a singular value decomposition (Levy and Goldberg, 2014),
which GloVe approximates. Any file of that format, as those of the GloVe project, works as well.
The same small language model then learns from the same batches with a table drawn at random, with
one that starts from the vectors, and with one that stays at them.
"""

import collections
import re
import tempfile
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro

from gptlite.cli import exit_on_error
from gptlite.config import ModelConfig, OptimizerConfig, TrainingConfig
from gptlite.errors import require
from gptlite.family.glove import read_glove
from gptlite.family.train import train
from gptlite.machine.pytrees import is_parameter
from gptlite.machine.runtime import set_up_jax
from gptlite.models.gpt import GPT
from gptlite.runs.corpora import load_corpus
from gptlite.text.batches import Batches, evaluation_batches
from gptlite.training.loss import window_losses

WORDS = 2_000
D_MODEL = 64
NEAR = 4


def write_vectors(path, ids, words):
    """One line per word, from the words that stand at most `NEAR` places from it."""
    near = np.zeros((len(words), len(words)))
    for distance in range(1, NEAR + 1):
        np.add.at(near, (ids[:-distance], ids[distance:]), 1.0)
    near += near.T
    often = near.sum(axis=0) + 1e-9
    information = np.log(np.maximum(near * often.sum() / np.outer(often, often), 1.0))
    left, sizes, _ = np.linalg.svd(information, hermitian=True)
    vectors = left[:, :D_MODEL] * np.sqrt(sizes[:D_MODEL])
    vectors /= vectors.std()
    with path.open("w", encoding="utf-8") as file:
        for word, row in zip(words, vectors, strict=True):
            print(word, *(f"{x:.4f}" for x in row), file=file)


def main(
    steps: int = 300, seed: int = 0, corpus: str = "auto", vectors: Path | None = None
) -> None:
    """A model of words, from vectors in GloVe's text format.

    Args:
        steps: Training steps.
        seed: Of the models and the batches.
        corpus: Where text comes from; see gptlite train.
        vectors: A file of vectors, with as many numbers per word as the model is to be wide.
        Without it, one is made.
    """
    began = time.perf_counter()
    set_up_jax(cpu_devices=2)
    training = TrainingConfig(
        steps=steps, batch_size=32, eval_every=steps, seed=seed, compute_dtype="float32"
    )
    text = re.findall(r"[a-z']+|[.,;:!?]", load_corpus(corpus).text.lower())
    count = len(text) * 9 // 10
    frequent = collections.Counter(text[:count]).most_common(WORDS - 1)
    words = ["<unk>", *(word for word, _ in frequent)]
    require(len(words) > D_MODEL, f"{corpus} has {len(words)} words; more are needed.")
    place = {word: i for i, word in enumerate(words)}
    ids = np.array([place.get(word, 0) for word in text], np.int32)

    with tempfile.TemporaryDirectory() as folder:
        if vectors is None:
            vectors = Path(folder) / "vectors.txt"
            write_vectors(vectors, ids[:count], words)
        weight, known = read_glove(vectors, words, seed=seed)
    print(f"{known.sum():,} of {len(words):,} words have vectors, of {weight.shape[1]} numbers")
    nearest = weight / (np.linalg.norm(weight, axis=1, keepdims=True) + 1e-9)
    for word in [word for word in ("king", "love", "sword") if word in place]:
        closest = np.argsort(-nearest @ nearest[place[word]])[1:6]
        print(f"    near {word}: {', '.join(words[i] for i in closest)}")

    config = ModelConfig(
        n_layers=2,
        n_heads=2 if weight.shape[1] % 4 == 0 else 1,
        d_model=weight.shape[1],
        positions="learned" if weight.shape[1] % 2 else "rotary",  # which turns pairs of numbers
        context_length=32,
        embed_previous=0,
    )
    batches = Batches(ids[:count], training.batch_size, config.context_length, seed)
    held_out, targets = evaluation_batches(ids[count:], config.context_length)
    held_out = held_out.reshape(-1, config.context_length + 1)[: targets // config.context_length]
    require(len(held_out) > 0, f"{corpus} is too short: nothing is left to validate on.")

    def evaluate(model):
        losses, _ = eqx.filter_jit(window_losses)(model, jnp.asarray(held_out))
        return f"validation loss {losses.mean():.4f} nats per word"

    for name, start, frozen in (
        ("drawn at random", None, False),
        ("starting from the vectors", weight, False),
        ("frozen to the vectors", weight, True),
    ):
        print(f"a table {name}:")
        key = jax.random.key(seed)
        model = GPT(config, len(words), key=key)
        if start is not None:
            model = eqx.tree_at(lambda model: model.embedding.weight, model, jnp.asarray(start))
        trainable = eqx.tree_at(
            lambda model: model.embedding.weight, jax.tree.map(is_parameter, model), not frozen
        )
        train(
            model,
            window_losses,
            batches,
            OptimizerConfig(),
            training,
            trainable=trainable,
            evaluate=evaluate,
        )
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    with exit_on_error():
        tyro.cli(main)
