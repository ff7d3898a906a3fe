"""Batches that are read ahead of the steps, on a thread, and checked."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from gptlite.errors import UserError, require
from gptlite.machine.ids import check_ids

# Batches that are read ahead of the steps. More would only delay the start, and fill memory.
MAX_AHEAD = 64


def check_batch(train_steps: Any, batch: PyTree, step: int) -> None:
    """**Raises:** `UserError` if the batch of a step does not begin with an axis of this
    process's rows, or has an id that is not in the vocabulary."""
    wanted = train_steps.batch_shape
    leaves = jax.tree.leaves(batch)
    if not leaves or any(np.shape(x)[: len(wanted)] != wanted for x in leaves):
        is_whole = wanted[-1] == train_steps.training.batch_size
        what = "training.batch_size" if is_whole else "this process's rows"
        kind = jax.tree.map(lambda x: f"{np.asarray(x).dtype}{list(np.shape(x))}", batch)
        raise UserError(
            f"Batches must begin with an axis of {what}, {wanted[-1]}; at step {step}: {kind}."
        )
    if train_steps.vocab_size is not None:
        check_ids(leaves[0], train_steps.vocab_size)


class BatchReader:
    """Reads batches ahead of the steps, on a thread."""

    def __init__(self, batch_fn: Callable[[int], PyTree], train_steps: Any):
        """`train_steps`: a `TrainSteps`, which takes the batches."""
        self._batch_fn, self._train_steps = batch_fn, train_steps
        self._depth = self.capacity = 1
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._pending: dict[int, concurrent.futures.Future[PyTree]] = {}
        self._kind: PyTree = None

    def __call__(self, step: int, count: int) -> PyTree:
        """`count` batches from `step` on, stacked, followed by zeros up to the capacity."""
        self._read_ahead(step, step + count)
        batches = [self._pending.pop(i).result() for i in range(step, step + count)]
        for i, batch in enumerate(batches):
            self._check(step + i, batch)

        def stack(*leaves):
            stacked = np.zeros((self.capacity, *np.shape(leaves[0])), np.asarray(leaves[0]).dtype)
            for i, leaf in enumerate(leaves):
                stacked[i] = leaf
            return stacked

        return jax.tree.map(stack, *batches)

    def first(self, step: int) -> PyTree:
        """The batch of `step`, which stays to be read. To be called before all others: it says how
        much is read ahead."""
        self._read_ahead(step, step + 1)
        batch = self._pending[step].result()
        self.capacity = self._train_steps.capacity(batch)
        self._depth = min(2 * self.capacity, MAX_AHEAD)
        return batch

    def _read_ahead(self, step: int, end: int) -> None:
        steps = self._train_steps.steps
        for ahead in range(step, max(end, min(step + self._depth, steps))):
            if ahead not in self._pending:
                self._pending[ahead] = self._thread.submit(self._read, ahead)

    def _read(self, step: int) -> PyTree:
        # Copies: the function may fill the same arrays again.
        return jax.tree.map(np.array, self._batch_fn(step))

    def close(self) -> None:
        """Stop reading."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check(self, step: int, batch: PyTree) -> None:
        """**Raises:** `UserError` if the batch does not fit."""
        check_batch(self._train_steps, batch, step)
        kind = jax.tree.map(lambda x: (np.asarray(x).dtype, np.shape(x)), batch)
        require(
            self._kind is None or kind == self._kind,
            f"Batches must have the same shapes and dtypes at every step, got {kind} at step "
            f"{step}, and {self._kind} before.",
        )
        self._kind = kind
