"""From ids to batches on the devices."""

import concurrent.futures
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from gptlite.text.batches import Batches, Windows

# Batches read ahead: more would only delay the start, and fill memory.
MOST_AHEAD = 64

# `feed(step, count)`: the batches of `count` steps from `step` on, as the first of an array.
Feed = Callable[[int, int], Int[Array, "steps batch seq_and_next"]]


def make_feed(batches: Batches, capacity: int, by_row: NamedSharding) -> Feed:
    """The feed for at most `capacity` steps at a time, with each device's rows on it.

    Ids in memory are kept on every device, which cut their own windows from them. Ids that are
    mapped from a file are read by a thread, ahead of the steps.
    """
    shape = (capacity, batches.batch_size)
    length = batches.context_length + 1
    if isinstance(batches.tokens, np.memmap):
        ahead = _ReadAhead(batches, min(2 * capacity, MOST_AHEAD))

        def read(step: int, count: int) -> Array:
            windows = np.zeros((*shape, length), np.int32)
            for i in range(count):
                windows[i] = ahead(step + i)
            return jax.device_put(windows, by_row)

        return read

    everywhere = NamedSharding(by_row.mesh, PartitionSpec())
    tokens = jax.device_put(np.asarray(batches.tokens, np.int32), everywhere)

    @jax.jit(out_shardings=by_row)
    def cut(tokens: Array, starts: Array) -> Array:
        return tokens[starts[..., None] + jnp.arange(length)]

    def on_device(step: int, count: int) -> Array:
        starts = np.zeros(shape, np.int32)
        for i in range(count):
            starts[i] = batches.starts(step + i)
        return cut(tokens, jax.device_put(starts, by_row))

    return on_device


class _ReadAhead:
    """Batches, from a thread that is asked for the `depth` next ones too."""

    def __init__(self, batches: Batches, depth: int):
        self._batches, self._depth = batches, depth
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._asked: dict[int, concurrent.futures.Future[Windows]] = {}

    def __call__(self, step: int) -> Windows:
        for ahead in range(step, step + self._depth):
            if ahead not in self._asked:
                self._asked[ahead] = self._thread.submit(self._batches, ahead)
        return self._asked.pop(step).result()
