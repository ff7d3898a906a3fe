"""Beam search against searches that try everything."""

import dataclasses
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import drawn

from gptlite.errors import UserError
from gptlite.family.beam_search import beam_search
from gptlite.family.presets import VASWANI
from gptlite.family.seq2seq import Seq2Seq, shift_right
from gptlite.nn import WHOLE_SEQUENCE

VOCAB, START, END, LONGEST = 5, 0, 1, 4
CONFIG = dataclasses.replace(
    VASWANI, n_layers=2, n_heads=2, d_model=16, context_length=LONGEST, tied_head=False
)
VARIANTS = {
    "paper": dataclasses.replace(CONFIG, n_layers=1),
    "scan-grouped": dataclasses.replace(CONFIG, stack="scan", n_kv_heads=1, block="pre"),
}
SOURCE = jnp.asarray(np.random.default_rng(1).integers(VOCAB, size=(4, 4)))
LENGTHS = jnp.array([4, 3, 2, 1])
ENDS: dict[str, Any] = {"start": START, "end": END}


@pytest.fixture(scope="module", params=list(VARIANTS))
def model(request) -> Seq2Seq:
    return drawn(lambda key: Seq2Seq(VARIANTS[request.param], VOCAB, VOCAB, key=key), scale=2.0)


@pytest.fixture(scope="module")
def everything(model):
    """All targets there are, and their log probabilities `[source, target]`."""
    targets = [
        ids
        for length in range(1, LONGEST + 1)
        for ids in itertools.product(range(VOCAB), repeat=length)
        if END not in ids[:-1] and (ids[-1] == END or length == LONGEST)
    ]
    padded = jnp.array([[*ids, *[END] * (LONGEST - len(ids))] for ids in targets])
    lengths = np.array([len(ids) for ids in targets])

    @eqx.filter_jit
    def log_probs(model, source, length):
        logits = model(
            jnp.broadcast_to(source, (len(padded), len(source))),
            shift_right(padded, START),
            source_lengths=jnp.broadcast_to(length, len(padded)),
        )
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), padded[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(jnp.arange(LONGEST) < lengths[:, None], found, 0), axis=1)

    pairs = zip(SOURCE, LENGTHS, strict=True)
    return targets, lengths, np.stack([log_probs(model, *pair) for pair in pairs])


def written(ids):
    return [tuple(int(i) for i in row if i >= 0) for row in np.asarray(ids)]


@pytest.mark.parametrize("length_penalty", [0.0, 8.0])
def test_a_beam_as_wide_as_the_search_space_finds_the_best_of_all(
    model, everything, length_penalty
):
    targets, lengths, log_probs = everything
    scores = log_probs / ((5 + lengths) / 6) ** length_penalty
    assert (np.diff(np.sort(scores)[:, -2:]) > 1e-3).all()  # no ties
    found = beam_search(
        model,
        SOURCE,
        beam=VOCAB**LONGEST,
        length_penalty=length_penalty,
        source_lengths=LENGTHS,
        **ENDS,
    )
    best = scores.argmax(axis=1)
    assert written(found.ids) == [targets[i] for i in best]
    # Cached against uncached, in float32: sums in another order.
    np.testing.assert_allclose(found.log_prob, log_probs[range(len(best)), best], atol=1e-4)


def test_the_length_penalty_makes_a_difference(everything):
    targets, lengths, log_probs = everything
    best = [
        {targets[i] for i in (log_probs / ((5 + lengths) / 6) ** power).argmax(axis=1)}
        for power in (0.0, 8.0)
    ]
    assert best[0] != best[1]


def test_a_beam_of_one_takes_the_best_next_token(model, everything):
    targets, _, log_probs = everything
    greedy = beam_search(model, SOURCE, beam=1, source_lengths=LENGTHS, **ENDS)
    for row, ids in enumerate(written(greedy.ids)):
        assert ids in targets
        np.testing.assert_allclose(
            greedy.log_prob[row], log_probs[row, targets.index(ids)], atol=1e-4
        )
        for place in range(len(ids)):
            # Of all that begin as it does, by the token that comes next: the most probable.
            total = dict.fromkeys(range(VOCAB), 0.0)
            for target, log_prob in zip(targets, log_probs[row], strict=True):
                if target[:place] == ids[:place] and len(target) > place:
                    total[target[place]] += np.exp(log_prob)
            assert max(total, key=total.__getitem__) == ids[place]


def test_a_wider_beam_finds_nothing_worse(model):
    found = [
        beam_search(model, SOURCE, beam=b, source_lengths=LENGTHS, **ENDS) for b in (1, 3, 625)
    ]
    log_probs = np.stack([translation.log_prob for translation in found])
    assert (log_probs[-1] >= log_probs - 1e-5).all()


def test_a_source_in_a_padded_batch_gets_what_it_gets_alone(model):
    beam = 1 if model.config is VARIANTS["paper"] else 4
    together = beam_search(model, SOURCE, beam=beam, source_lengths=LENGTHS, **ENDS)
    for row, length in list(enumerate(LENGTHS.tolist()))[::2]:
        alone = beam_search(model, SOURCE[row : row + 1, :length], beam=beam, **ENDS)
        np.testing.assert_array_equal(alone.ids[0], together.ids[row])
        np.testing.assert_allclose(alone.log_prob[0], together.log_prob[row], atol=1e-4)


def test_max_new_tokens_ends_the_search(model):
    options = {"beam": 1, "source_lengths": LENGTHS, **ENDS}
    found = beam_search(model, SOURCE, max_new_tokens=2, **options)
    assert found.ids.shape == (4, 2)
    longer = beam_search(model, SOURCE, **options)
    np.testing.assert_array_equal(found.ids, longer.ids[:, :2])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens must be at least 1 and at most 4, got 0"),
        ({"max_new_tokens": 5}, r"max_new_tokens must be at least 1 and at most 4, got 5"),
        ({"beam": 0}, r"beam must be at least 1 and .* got 0"),
        (
            {"length_penalty": -1.0},
            r"length_penalty must be at least 0.0 .* 10.0, got -1.0",
        ),
        ({"start": -1}, r"start must be at least 0 and at most 4, got -1"),
        ({"end": 5}, r"end must be at least 0 and at most 4, got 5"),
        (
            {"source_lengths": np.array([0, 1, 1, 1])},
            "lengths must be from 1 to 4, the length of ids, got 0",
        ),
        (
            {"source_lengths": np.array([1, 1, 1, 5])},
            "lengths must be from 1 to 4, the length of ids, got 5",
        ),
    ],
)
def test_what_cannot_be_is_said(model, options, sentence):
    with pytest.raises(UserError, match=sentence):
        beam_search(model, SOURCE, **{**ENDS, **options})


@pytest.mark.parametrize("shape", [(0, 6), (2, 0)])
def test_an_empty_source_is_refused(model, shape):
    with pytest.raises(UserError, match="must be a source"):
        beam_search(model, jnp.zeros(shape, jnp.int32), **ENDS)


class Counting(eqx.Module):
    """An attention of one's own with a recurrent state: the sum of what it has read."""

    def __init__(self, config, *, causal, key):
        pass

    def init_cache(self, batch, capacity, dtype):
        return jnp.zeros((*batch, CONFIG.d_model), dtype)

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        total = jnp.cumsum(x, axis=-2) if cache is None else cache[..., None, :] + x
        return total, None if cache is None else total[..., -1, :]


def test_beam_search_reorders_a_recurrent_state():
    config = dataclasses.replace(CONFIG, attention=Counting, n_layers=1)
    model = drawn(lambda key: Seq2Seq(config, VOCAB, VOCAB, key=key), scale=2.0)
    found = beam_search(model, SOURCE, beam=VOCAB**2, max_new_tokens=2, **ENDS)
    logits_of = eqx.filter_jit(lambda model, *arguments: model(*arguments))
    for row, ids in enumerate(written(found.ids)):
        targets = jnp.asarray([*ids, *[END] * LONGEST][:LONGEST])[None]
        logits = logits_of(model, SOURCE[row : row + 1], shift_right(targets, START))
        log_probs = np.asarray(jax.nn.log_softmax(logits)[0])
        total = sum(log_probs[i, token] for i, token in enumerate(ids))
        np.testing.assert_allclose(found.log_prob[row], total, atol=1e-4)
