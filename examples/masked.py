"""Masked characters of TinyShakespeare, and whether the encoder's embeddings identify the speaker.

    python examples/masked.py

An encoder learns to predict masked characters from both sides (Devlin et al., 2019, "BERT", section
3.1). Then it is frozen, and a linear probe on the mean of its embeddings predicts which of the ten
most frequent speakers a speech belongs to, from its words alone. Baselines: the most frequent
speaker, and the same probe on character counts. The encoder never sees the speeches that the probes
are tested on.
"""

import collections
import re
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import tyro

from gptlite.cli import exit_on_error
from gptlite.config import ModelConfig, OptimizerConfig, TrainingConfig
from gptlite.errors import require
from gptlite.family.encoder import Encoder
from gptlite.family.train import train
from gptlite.machine.pytrees import count_parameters
from gptlite.machine.runtime import set_up_jax
from gptlite.nn import Linear
from gptlite.runs.corpora import load_corpus
from gptlite.text.tokenizer import CharTokenizer
from gptlite.training.loss import cross_entropy

SPEAKERS = 10
CONTEXT = 128
MASKED = 0.15


class MaskedLM(eqx.Module):
    """An encoder with a head that predicts the character at each position."""

    encoder: Encoder
    head: Linear

    def __init__(self, config: ModelConfig, vocab_size: int, *, key):
        encoder_key, head_key = jax.random.split(key)
        # One id more than there are characters: the mask.
        self.encoder = Encoder(config, vocab_size + 1, key=encoder_key)
        self.head = Linear(config.d_model, vocab_size, std=0.0, key=head_key)

    def __call__(self, ids, *, key=None):
        return self.head(self.encoder(ids, lengths=lengths_of(ids), key=key))


def lengths_of(ids):
    """How many ids of each row are real: padding is -1, after the real ids."""
    return jnp.sum(ids >= 0, axis=-1)


def losses(model, batch, *, label_smoothing, key):
    """`[batch, seq]`; `loss_mask` selects the masked positions."""
    ids, targets = batch["ids"], batch["targets"]
    logits = model(ids, key=key)
    return cross_entropy(logits, jnp.maximum(targets, 0), label_smoothing)


def loss_mask(batch):
    """True at masked positions."""
    return batch["targets"] >= 0


def pieces_of(speech):
    """`[pieces, CONTEXT]`: a speech's ids, and -1 behind its end."""
    padded = np.pad(speech, (0, -len(speech) % CONTEXT), constant_values=-1)
    return padded.reshape(-1, CONTEXT).astype(np.int32)


def mask(random, ids, vocab_size):
    """`ids` with 15 % of the characters chosen: 80 % of them replaced by the mask, 10 % by a random
    character, 10 % unchanged. And the chosen characters, -1 elsewhere."""
    chosen = (random.random(ids.shape) < MASKED) & (ids >= 0)
    how = random.random(ids.shape)
    hidden = np.where(chosen & (how < 0.8), vocab_size, ids)
    other = random.integers(vocab_size, size=ids.shape)
    hidden = np.where(chosen & (how >= 0.9), other, hidden)
    return {"ids": hidden.astype(np.int32), "targets": np.where(chosen, ids, -1).astype(np.int32)}


def in_parts(function, pieces):
    """`function` of every piece, some at a time: all at once would take gigabytes."""
    return jax.lax.map(function, pieces, batch_size=64)


def probe(features, labels, test_features, test_labels):
    """The share of the test that a logistic regression gets right."""
    mean, std = features.mean(0), features.std(0) + 1e-6
    x, test = (features - mean) / std, (test_features - mean) / std

    @jax.jit
    @jax.value_and_grad
    def loss(weight):
        weight = weight.reshape(SPEAKERS, -1)
        logits = x @ weight[:, :-1].T + weight[:, -1]
        return jnp.mean(cross_entropy(logits, jnp.asarray(labels))) + 0.01 * jnp.sum(
            weight[:, :-1] ** 2
        )

    zero = np.zeros(SPEAKERS * (x.shape[1] + 1))
    weight = scipy.optimize.minimize(loss, zero, jac=True).x.reshape(SPEAKERS, -1)
    return np.mean(np.argmax(test @ weight[:, :-1].T + weight[:, -1], axis=1) == test_labels)


def main(steps: int = 1000, seed: int = 0, corpus: str = "shakespeare") -> None:
    """Train on masked characters, then predict the speaker from the embeddings.

    Args:
        steps: Training steps.
        seed: Of the split of the speeches, the model and the batches.
        corpus: A play: speeches with the speaker's name and a colon above. See gptlite train.
    """
    began = time.perf_counter()
    set_up_jax(cpu_devices=2)
    training = TrainingConfig(
        steps=steps, batch_size=32, eval_every=200, seed=seed, compute_dtype="float32"
    )
    # Text to speeches: "NAME:", its lines, an empty line.
    text = load_corpus(corpus).text
    play = re.findall(r"^([^\n:]+):\n(.+?)(?:\n\n|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    frequent = collections.Counter(name for name, _ in play).most_common(SPEAKERS)
    require(
        len(frequent) == SPEAKERS and frequent[-1][1] >= 5,
        f"{corpus} must have {SPEAKERS} speakers with at least 5 speeches each.",
    )
    speakers = [name for name, _ in frequent]
    order = np.random.default_rng(seed).permutation(len(play))
    known = [i for i in order if play[i][0] in speakers]
    test, train_on = known[: len(known) // 5], known[len(known) // 5 :]
    labels, test_labels = (
        np.array([speakers.index(play[i][0]) for i in part]) for part in (train_on, test)
    )
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    vocab = tokenizer.vocab_size
    speeches = [tokenizer.encode(words) for _, words in play]
    read = np.concatenate([pieces_of(speeches[i]) for i in sorted(set(order) - set(test))])
    held_out = np.concatenate([pieces_of(speeches[i]) for i in test])
    print(f"{len(play):,} speeches; {', '.join(speakers)}: {len(known):,}, {len(test)} to test on")

    def batch(step):
        random = np.random.default_rng([seed, step])
        rows = random.integers(len(read), size=training.batch_size)
        return mask(random, read[rows], vocab)

    config = ModelConfig(n_layers=3, n_heads=4, d_model=128, d_ff=256, context_length=CONTEXT)
    model = MaskedLM(config, vocab, key=jax.random.key(seed))
    print(f"{count_parameters(model):,} parameters")
    masked_test = mask(np.random.default_rng(seed), held_out, vocab)

    @eqx.filter_jit
    def guesses(model, ids):
        return in_parts(lambda ids: jnp.argmax(model(ids), axis=-1), ids)

    def evaluate(model):
        found, targets = guesses(model, jnp.asarray(masked_test["ids"])), masked_test["targets"]
        right = np.asarray(found)[targets >= 0] == targets[targets >= 0]
        return f"of masked characters in unseen speeches right: {right.mean():.1%}"

    model = train(
        model, losses, batch, OptimizerConfig(), training, loss_mask=loss_mask, evaluate=evaluate
    )

    @eqx.filter_jit
    def summed(encoder, ids):
        """The sum of a piece's embeddings."""

        def sum_of(ids):
            real = ids >= 0
            embeddings = encoder(ids, lengths=lengths_of(ids))
            return jnp.sum(jnp.where(real[:, None], embeddings, 0), axis=0)

        return in_parts(sum_of, ids)

    def mean_embeddings(part):
        pieces = [pieces_of(speeches[i]) for i in part]
        sums = np.asarray(summed(model.encoder, jnp.asarray(np.concatenate(pieces))))
        starts = np.cumsum([0, *map(len, pieces)])[:-1]
        return np.add.reduceat(sums, starts) / [[len(speeches[i])] for i in part]

    def bags(part):
        counts = [np.bincount(speeches[i], minlength=vocab) for i in part]
        return np.array(counts) / [[len(speeches[i])] for i in part]

    print(f"which of {SPEAKERS} speakers, right of {len(test)} unseen speeches:")
    print(f"    always {speakers[0]:<22}{np.mean(test_labels == 0):.1%}")
    for name, features in (("bag of characters", bags), ("mean of embeddings", mean_embeddings)):
        right = probe(features(train_on), labels, features(test), test_labels)
        print(f"    {name:<29}{right:.1%}")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    with exit_on_error():
        tyro.cli(main)
