"""Ids to batches: a pure function of (seed, step), the same on every machine."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from gptlite.errors import require
from gptlite.machine.fields import Count, Seed, check_value
from gptlite.text.tokenizer import Ids

# Tokens in one batch of evaluation.
TOKENS_PER_BATCH = 8192

Windows = Int[np.ndarray, "windows seq_and_next"]


@dataclass(frozen=True)
class Batches:
    """Windows of `context_length + 1` ids (inputs, and targets one further), shuffled.

    In each epoch, the text is cut from another offset into consecutive windows without overlap, and
    each window is used once, in another order. A batch may belong to two epochs.

    **Raises:** `UserError` if `tokens` is too short for a single window from every offset, or a
    number is out of range.
    """

    tokens: Ids
    batch_size: int
    context_length: int
    seed: int
    rows: Int[np.ndarray, " rows"] | None = None
    """Which rows of a batch to read. None: all."""

    def __post_init__(self):
        check_value("batch_size", self.batch_size, Count)
        check_value("context_length", self.context_length, Count)
        check_value("seed", self.seed, Seed)
        require(
            self.windows_per_epoch >= 1,
            f"The training text is too short: it has {len(self.tokens):,} tokens, and a "
            f"context_length of {self.context_length} needs at least {2 * self.context_length:,}.",
        )

    @property
    def windows_per_epoch(self) -> int:
        """The same for every offset below `context_length`."""
        return (len(self.tokens) - self.context_length) // self.context_length

    def __call__(self, step: int) -> Windows:
        """The batch of `step`, counted from 0: `[rows, context_length + 1]`."""
        rows = range(self.batch_size) if self.rows is None else self.rows.tolist()
        places = (divmod(step * self.batch_size + row, self.windows_per_epoch) for row in rows)
        starts = np.array([self._start(epoch, index) for epoch, index in places])
        ids = self.tokens[starts[:, None] + np.arange(self.context_length + 1)]
        return ids.astype(np.int32)

    def _start(self, epoch: int, index: int) -> int:
        offset, order = self._order(epoch)
        return offset + int(order[index]) * self.context_length

    @functools.cached_property
    def _order(self) -> Callable[[int], tuple[int, Int[np.ndarray, " windows"]]]:
        """`_epoch`, with the last two results cached: a batch may belong to two epochs."""
        sizes = {"windows": self.windows_per_epoch, "context_length": self.context_length}
        return functools.lru_cache(maxsize=2)(functools.partial(_epoch, self.seed, **sizes))


def _epoch(
    seed: int, epoch: int, windows: int, context_length: int
) -> tuple[int, Int[np.ndarray, " windows"]]:
    """One epoch's offset and order.

    From the raw output of a counter-based generator (Philox: Salmon et al., 2011), whose stream
    NumPy guarantees for all versions, as it does not for `Generator.permutation`.
    """
    raw = np.random.Philox(key=[seed, epoch]).random_raw(windows + 1)
    # Half the memory of argsort's own: an epoch may have millions of windows.
    return int(raw[0] % context_length), np.argsort(raw[1:], kind="stable").astype(np.int32)


def evaluation_batches(
    tokens: Ids, context_length: int, devices: int = 1
) -> tuple[Int[np.ndarray, "batches rows seq_and_next"], int]:
    """All of `tokens` in consecutive windows of `context_length + 1`, each starting with the last
    id of the one before, in batches whose rows `devices` devices can share evenly; and the number
    of targets in all, `len(tokens) - 1`. Places beyond them are filled with -1.

    **Raises:** `UserError` if there are fewer than 2 tokens, or `context_length` is below 1.
    """
    check_value("context_length", context_length, Count)
    targets = len(tokens) - 1
    require(
        targets >= 1,
        f"The validation text is too short: its {len(tokens)} tokens leave nothing to predict. "
        "The last 10 % of the corpus must hold at least 2.",
    )
    windows = -(-targets // context_length)
    rows = min(windows, max(1, TOKENS_PER_BATCH // context_length))
    rows = -(-rows // devices) * devices
    batches = -(-windows // rows)
    padded = np.full(batches * rows * context_length + 1, -1, np.int32)
    padded[: len(tokens)] = tokens
    starts = np.arange(batches * rows).reshape(batches, rows, 1) * context_length
    return padded[starts + np.arange(context_length + 1)], targets
