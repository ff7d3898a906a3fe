"""What a layer remembers: associative recall (Arora et al., 2023, "Zoology", section 3).

    python benchmarks/recall.py --pairs 16 64

A sequence has pairs of a key and a value, all at random, and then the keys once more, in another
order: after each, the model is to name its value. Nothing else is trained, and nothing can be known
but by recall. The models have the preset `quick`'s shape, with a context of four times the pairs,
and each sees the same sequences in the same order from the same seed.

Prints the share of right answers in new sequences, mean ± half of the 95 % interval over seeds, and
the seconds that training took, without compilation.
"""

import argparse
import collections
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import print_table
from scipy import stats
from states import MIXERS, make_config

import gptlite as gl
from gptlite.machine.runtime import set_up_jax
from gptlite.presets import PRESETS

# How many keys there are, and values. The first ids are the keys.
KEYS = 128
BATCH_SIZE = 32
# Of new sequences.
HELD_OUT = 20


class Sequences:
    """Batches `[batch, 4 pairs]`, from a seed and the number of a step."""

    def __init__(self, pairs: int, seed: int):
        self.pairs, self.seed = pairs, seed

    def __call__(self, step: int) -> np.ndarray:
        random = np.random.default_rng((self.seed, step))
        keys = random.permuted(np.tile(np.arange(KEYS), (BATCH_SIZE, 1)), axis=1)[:, : self.pairs]
        told = np.stack([keys, random.integers(KEYS, 2 * KEYS, keys.shape)], axis=-1)
        asked = random.permuted(told.view(f"V{2 * told.itemsize}")[..., 0], axis=1)
        asked = asked.view(told.dtype).reshape(told.shape)
        return np.concatenate([told, asked], axis=1).reshape(BATCH_SIZE, -1).astype(np.int32)


def answers(model: gl.GPT, ids: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The logits after each key that is asked for, and its value."""
    half = ids.shape[-1] // 2
    logits = model(ids[:, :-1], key=key)
    return logits[:, half::2], ids[:, half + 1 :: 2]


def losses(model, ids, *, label_smoothing, key):
    """Of the answers."""
    return gl.cross_entropy(*answers(model, ids, key), label_smoothing)


@eqx.filter_jit
def share_right(model: gl.GPT, ids: jax.Array) -> jax.Array:
    """Of the answers of a batch."""
    logits, values = answers(model, ids, None)
    return jnp.mean(jnp.argmax(logits, axis=-1) == values)


def accuracies(mixer: str, pairs: int, steps: int, seeds: int) -> list[tuple[float, float]]:
    """Of each seed after training, and the seconds of that."""
    preset = PRESETS["quick"][1]
    config = make_config(mixer, 4 * pairs)
    training = dataclasses.replace(
        preset.training, steps=steps, batch_size=BATCH_SIZE, eval_every=steps
    )
    make = eqx.filter_jit(lambda key: gl.GPT(config, 2 * KEYS, key=key))
    abstract = eqx.filter_eval_shape(make, jax.random.key(0))
    # One for all seeds, so that it is compiled once.
    train_steps = gl.TrainSteps(
        abstract, preset.optimizer, training, gl.make_mesh(), loss_fn=losses
    )
    found = []
    for seed in range(seeds):
        state = train_steps.init(make(jax.random.key(seed)))
        progress = gl.fit(state, train_steps, Sequences(pairs, seed))
        last = collections.deque(progress, maxlen=1)[0]
        new = Sequences(pairs, seed + 10**6)
        right = [share_right(last.model, jnp.asarray(new(i))) for i in range(HELD_OUT)]
        found.append((float(np.mean(right)), last.position.step_seconds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mixers", nargs="+", default=MIXERS, help="an attention, or A+N:B")
    parser.add_argument("--pairs", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    set_up_jax(PRESETS["quick"][1].training.cpu_devices)
    for pairs in arguments.pairs:
        rows = []
        for mixer in arguments.mixers:
            print(f"training {mixer}, {arguments.seeds} seeds ...", flush=True)
            right, seconds = np.transpose(
                accuracies(mixer, pairs, arguments.steps, arguments.seeds)
            )
            half = 0.0
            if len(right) > 1:
                half = stats.t.ppf(0.975, len(right) - 1) * stats.sem(right)
            rows.append([mixer, f"{right.mean():.1%} ± {half:.1%}", f"{np.median(seconds):.1f}"])
            print(f"right answers: {rows[-1][1]}", flush=True)
        print(f"{pairs} pairs, {arguments.steps} steps, {arguments.seeds} seeds")
        print_table(["", "right answers", "s a seed"], rows)


if __name__ == "__main__":
    main()
