"""Words in, their rot13 out: the original transformer on the smallest of translations.

    python examples/rot13.py

Every letter is replaced by the one 13 places on, so that the decoder has to look at the right place
of the source, for words of any length, and to learn 26 pairs. Post-norm, sinusoidal positions on
scaled embeddings, one table for source, target and head, dropout, label smoothing, the Noam
schedule: all as in Vaswani et al., 2017, but smaller. Words are those of a text; 1,000 of them are
kept for the end.
"""

import codecs
import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from gptlite.cli import exit_on_error
from gptlite.config import OptimizerConfig, TrainingConfig
from gptlite.errors import require
from gptlite.family.beam_search import beam_search
from gptlite.family.presets import VASWANI
from gptlite.family.seq2seq import Seq2Seq, shift_right
from gptlite.family.train import train
from gptlite.machine.pytrees import count_parameters
from gptlite.machine.runtime import set_up_jax
from gptlite.runs.corpora import load_corpus
from gptlite.training.loss import cross_entropy

LETTERS = "abcdefghijklmnopqrstuvwxyz"
START, END = 26, 27
VOCAB = 28
LONGEST = 16
UNSEEN = 1_000


def ids_of(words):
    """`[words, LONGEST]`, with -1 where a word has ended."""
    ids = np.full((len(words), LONGEST), -1, np.int32)
    for row, word in zip(ids, words, strict=True):
        row[: len(word)] = [LETTERS.index(letter) for letter in word]
    return ids


def words_of(ids):
    """The words again, each up to its end."""
    letters = [*LETTERS, "<start>"]
    return ["".join(letters[i] for i in row if i >= 0 and i != END) for row in np.asarray(ids)]


def rot13(words):
    return [codecs.encode(word, "rot13") for word in words]


def lengths_of(ids):
    """How many ids of each row are real: padding is -1, after the real ids."""
    return jnp.sum(ids >= 0, axis=-1)


def losses(model, batch, *, label_smoothing, key):
    """`[batch, seq]`, padding included, which `loss_mask` leaves out."""
    source, targets = batch["source"], batch["targets"]
    logits = model(source, shift_right(targets, START), source_lengths=lengths_of(source), key=key)
    return cross_entropy(logits, jnp.maximum(targets, 0), label_smoothing)


def loss_mask(batch):
    """All but padding."""
    return batch["targets"] >= 0


def main(steps: int = 2000, seed: int = 0, corpus: str = "auto") -> None:
    """Words in, their rot13 out.

    Args:
        steps: Training steps.
        seed: Of the split of the words, the model and the batches.
        corpus: Where words come from; see gptlite train.
    """
    began = time.perf_counter()
    set_up_jax(cpu_devices=2)
    training = TrainingConfig(
        steps=steps,
        batch_size=128,
        label_smoothing=0.1,
        eval_every=250,
        seed=seed,
        compute_dtype="float32",
    )
    text = load_corpus(corpus).text.lower()
    words = sorted({word for word in re.findall("[a-z]+", text) if len(word) <= LONGEST})
    require(len(words) > 2 * UNSEEN, f"{corpus} has {len(words):,} words; more are needed.")
    words = np.random.default_rng(seed).permutation(words)
    unseen, seen = words[:UNSEEN].tolist(), words[UNSEEN:]
    held_out = set(unseen)

    def batch(step):
        """Half of them words, half of them made up: those cannot be guessed and must be read."""
        random = np.random.default_rng([seed, step])
        half = training.batch_size // 2
        made_up: list[str] = []
        while len(made_up) < half:
            word = "".join(random.choice(list(LETTERS), size=random.integers(1, LONGEST + 1)))
            if word not in held_out:
                made_up.append(word)
        words = [*made_up, *random.choice(seen, size=half)]
        targets = np.pad(ids_of(rot13(words)), ((0, 0), (0, 1)), constant_values=-1)
        targets[np.arange(len(words)), [len(word) for word in words]] = END
        return {"source": ids_of(words), "targets": targets}

    config = dataclasses.replace(
        VASWANI, n_layers=2, n_heads=4, d_model=64, context_length=LONGEST + 1
    )
    model = Seq2Seq(config, VOCAB, VOCAB, share_embedding=True, key=jax.random.key(seed))
    print(
        f"{len(seen):,} words, {count_parameters(model):,} parameters; "
        f"{seen[0]} is to become {rot13(seen[:1])[0]}"
    )
    optimizer = OptimizerConfig(
        name="adamw", learning_rate=3e-3, schedule="noam", warmup_fraction=0.04, beta2=0.98
    )

    def right(model, beam):
        source = jnp.asarray(ids_of(unseen))
        found = beam_search(
            model, source, beam=beam, source_lengths=lengths_of(source), start=START, end=END
        )
        return np.mean([a == b for a, b in zip(words_of(found.ids), rot13(unseen), strict=True)])

    def evaluate(model):
        return f"exactly right of {UNSEEN:,} unseen words: {right(model, beam=1):.1%}"

    model = train(model, losses, batch, optimizer, training, loss_mask=loss_mask, evaluate=evaluate)
    print(f"with a beam of 4: {right(model, beam=4):.1%}")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    with exit_on_error():
        tyro.cli(main)
