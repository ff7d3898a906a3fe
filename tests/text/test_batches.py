import numpy as np
import pytest
from hypothesis import given, strategies as st

from gptlite.errors import UserError
from gptlite.text.batches import Batches, evaluation_batches


@given(
    tokens=st.integers(20, 400),
    batch_size=st.integers(1, 7),
    context=st.integers(1, 10),
    seed=st.integers(0, 2**31 - 1),
)
def test_an_epoch_visits_every_window_once(tokens, batch_size, context, seed):
    batches = Batches(np.arange(tokens), batch_size, context, seed)
    per_epoch = batches.windows_per_epoch
    steps = -(-2 * per_epoch // batch_size)
    rows = np.concatenate([batches(step) for step in range(steps)])
    assert rows.shape == (steps * batch_size, context + 1)
    # Ids are their own places, so each row shows where it was cut.
    np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(context + 1))
    for epoch in range(2):
        starts = np.sort(rows[epoch * per_epoch : (epoch + 1) * per_epoch, 0])
        np.testing.assert_array_equal(np.diff(starts), context)
        assert 0 <= starts[0] < context
        assert starts[-1] + context < tokens
        # No window more would fit, whatever the offset.
        assert starts[-1] + 3 * context >= tokens


def test_a_batch_depends_on_seed_and_step_alone():
    tokens = np.arange(1000)
    first = Batches(tokens, 4, 8, seed=1)
    later = first(50)
    np.testing.assert_array_equal(Batches(tokens, 4, 8, seed=1)(50), later)
    assert not np.array_equal(Batches(tokens, 4, 8, seed=2)(50), later)
    assert not np.array_equal(first(51), later)


def test_the_order_is_pinned():
    """The same on every machine and version: these are the numbers of the first one."""
    np.testing.assert_array_equal(
        Batches(np.arange(100), 6, 10, seed=3)(0)[:, 0], [55, 5, 75, 45, 15, 65]
    )


def test_epochs_differ_in_order_and_offset():
    batches = Batches(np.arange(10_000), 100, 99, seed=0)
    epochs = np.stack([batches(step)[:, 0] for step in range(4)])
    assert batches.windows_per_epoch == 100
    assert len({int(starts.min()) for starts in epochs}) > 1
    orders = {tuple((starts - starts.min()).tolist()) for starts in epochs}
    assert len(orders) == 4


def test_too_short_a_text_is_refused():
    with pytest.raises(UserError, match=r"15 tokens.*at least 16"):
        Batches(np.arange(15), 1, 8, seed=0)
    Batches(np.arange(16), 1, 8, seed=0)(0)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("batch_size", (0, 8, 0)), ("context_length", (4, 0, 0)), ("seed", (4, 8, -1))],
)
def test_numbers_out_of_range_are_named(name, sizes):
    with pytest.raises(UserError, match=f"{name} must be"):
        Batches(np.arange(100), *sizes)
    if name == "context_length":
        with pytest.raises(UserError, match=f"{name} must be"):
            evaluation_batches(np.arange(100), 0)


@given(tokens=st.integers(2, 300), context=st.integers(1, 20), devices=st.integers(1, 4))
def test_validation_windows_hold_every_target_once(tokens, context, devices):
    ids = np.arange(tokens)
    batches, targets = evaluation_batches(ids, context, devices)
    assert batches.shape[1] % devices == 0
    windows = batches.reshape(-1, context + 1)
    seen = windows[:, 1:][windows[:, 1:] >= 0]
    np.testing.assert_array_equal(seen, ids[1:])
    assert targets == tokens - 1
    before = windows[:, :-1][windows[:, 1:] >= 0]
    np.testing.assert_array_equal(before, ids[:-1])


def test_nothing_to_validate_is_refused():
    with pytest.raises(UserError, match="validation text is too short"):
        evaluation_batches(np.arange(1), 8)
