"""Ten digits in, the reversed sequence out; every second occurrence of a digit becomes X.

    python examples/reverse.py

`0 1 5 9 0 3 5 2 5 7` gives `7 5 2 X 3 X 9 5 1 0`: from the left, the second 0 and the second 5
become X, and the third 5 stays. The encoder has to count, and the decoder has to read backwards.
Pre-norm, ReLU² and Muon, as in gptlite's presets, with separate tables for source and target.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from gptlite.cli import exit_on_error
from gptlite.config import ModelConfig, OptimizerConfig, TrainingConfig
from gptlite.family.beam_search import beam_search
from gptlite.family.seq2seq import Seq2Seq, shift_right
from gptlite.family.train import train
from gptlite.machine.pytrees import count_parameters
from gptlite.machine.runtime import set_up_jax
from gptlite.training.loss import cross_entropy

DIGITS = 10
X, START, END = 10, 11, 12
UNSEEN = 10_000


def answer(digits):
    """The targets, `[batch, seq]`."""
    same = digits[:, :, None] == digits[:, None, :]
    times = np.tril(same).sum(-1)  # occurrences of the digit so far, this one included
    return np.where(times % 2 == 0, X, digits)[:, ::-1]


def with_end(answers):
    return np.pad(answers, ((0, 0), (0, 1)), constant_values=END)


def number(digits):
    """A sequence as one number, to find it again."""
    return digits @ 10 ** np.arange(DIGITS)


def losses(model, batch, *, label_smoothing, key):
    """`[batch, seq]`, the end included."""
    logits = model(batch["source"], shift_right(batch["targets"], START), key=key)
    return cross_entropy(logits, batch["targets"], label_smoothing)


def main(steps: int = 2000, seed: int = 0) -> None:
    """Ten digits in, the reversed sequence out; every second occurrence of a digit becomes X.

    Args:
        steps: Training steps.
        seed: Of the sequences to test on, the model and the batches.
    """
    began = time.perf_counter()
    set_up_jax(cpu_devices=2)
    training = TrainingConfig(
        steps=steps, batch_size=128, eval_every=250, seed=seed, compute_dtype="float32"
    )
    unseen = np.random.default_rng(seed).integers(10, size=(UNSEEN, DIGITS))
    held_out = number(unseen)

    def batch(step):
        random = np.random.default_rng([seed, step])
        digits = random.integers(10, size=(training.batch_size, DIGITS))
        while (found := np.isin(number(digits), held_out)).any():
            digits[found] = random.integers(10, size=(found.sum(), DIGITS))
        targets = with_end(answer(digits))
        return {"source": digits.astype(np.int32), "targets": targets.astype(np.int32)}

    config = ModelConfig(
        n_layers=2,
        n_heads=4,
        d_model=64,
        context_length=DIGITS + 1,
        positions="sinusoidal",
        embed_previous=0,
    )
    model = Seq2Seq(config, 10, END + 1, key=jax.random.key(seed))
    print(f"{count_parameters(model):,} parameters")

    def evaluate(model):
        found = beam_search(model, jnp.asarray(unseen), beam=1, start=START, end=END).ids
        right = np.mean(np.all(np.asarray(found) == with_end(answer(unseen)), axis=1))
        return f"exactly right of {UNSEEN:,} unseen sequences: {right:.2%}"

    model = train(model, losses, batch, OptimizerConfig(), training, evaluate=evaluate)
    print(f"{time.perf_counter() - began:.0f} s")
    shown = np.array([[0, 1, 5, 9, 0, 3, 5, 2, 5, 7]])
    found = beam_search(model, jnp.asarray(shown), beam=1, start=START, end=END).ids[0]
    print(
        " ".join(map(str, shown[0])),
        "->",
        " ".join("X" if i == X else str(i) for i in found[:DIGITS].tolist()),
    )


if __name__ == "__main__":
    with exit_on_error():
        tyro.cli(main)
