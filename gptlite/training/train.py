"""Training of any model, on any batches. (`loop` is for language models on a text: with evaluations
and checkpoints.)"""

import sys
from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree
from tqdm import tqdm

from gptlite.config import OptimizerConfig, TrainingConfig, UserError
from gptlite.training.loop import DivergenceError, data_mesh
from gptlite.training.optimizer import make_optimizer, make_schedule
from gptlite.training.step import Losses, StepMetrics, init_state, make_train_steps

M = TypeVar("M", bound=eqx.Module)


def train(
    model: M,
    losses: Losses,
    batch: Callable[[int], PyTree],
    optimizer: OptimizerConfig,
    training: TrainingConfig,
    *,
    look: Callable[[M], str] = lambda model: "",
) -> M:
    """A copy of `model`, trained for `training.steps` steps. Progress is shown on the way.

    All devices share every batch (`gptlite.runtime.set_up_jax(2)`, at the start of a program, makes
    two of a CPU). Nothing is saved. Of `training`, what is for `train.py` does nothing here:
    `cpu_devices`, `sample_tokens`, `save_seconds`, `keep`.

    **Arguments:**

    - `model`: with a `config`, a `ModelConfig`, which tells if there is dropout.
    - `losses(model, batch, label_smoothing=, key=)`: in nats, any shape; the mean is taken. To
      leave padding out, return the mean over the rest:
      `jnp.sum(jnp.where(real, losses, 0)) / jnp.sum(real)`.
    - `batch(step)`: NumPy arrays, in any pytree, that begin with an axis of `training.batch_size`.
      The same for the same step, if training is to be repeatable.
    - `look(model)`: called every `training.eval_every` steps and at the end; what it returns is
      shown. The model that it is given lives until it returns.

    **Raises:** `UserError` if the devices cannot share a batch, or a batch has not the size or the
    shapes that it should; `DivergenceError` at a loss or gradient that is not finite.
    """
    mesh = data_mesh(training.batch_size // training.accumulation)
    by_row = NamedSharding(mesh, PartitionSpec(None, "data"))
    rule = make_optimizer(optimizer, training.steps, model, axis_name="data")
    schedule = make_schedule(optimizer, training.steps)
    train_steps = make_train_steps(training, rule, mesh, losses)
    copy = jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, model)
    state = eqx.filter_shard(init_state(copy, rule), NamedSharding(mesh, PartitionSpec()))

    def check(metrics: StepMetrics, first: int, count: int) -> float:
        """The mean loss of the `count` steps from `first` on."""
        new, finite = np.asarray(metrics.loss)[:count], np.asarray(metrics.finite)[:count]
        if not finite.all() and training.on_nonfinite == "stop":
            bad = int(np.argmin(finite))
            raise DivergenceError(
                {
                    "step": first + bad + 1,
                    "loss": float(new[bad]),
                    "grad_norm": float(metrics.grad_norm[bad]),
                    "learning_rate": optimizer.learning_rate * float(schedule(first + bad)),
                },
                None,
            )
        return float(new[finite].mean()) if finite.any() else float("nan")

    wanted = jax.tree.map(np.shape, batch(0))

    def checked(step: int) -> PyTree:
        found = batch(step)
        shapes = jax.tree.map(np.shape, found)
        sizes = {leaf.shape[0] if np.ndim(leaf) else 0 for leaf in jax.tree.leaves(found)}
        if shapes != wanted or sizes != {training.batch_size}:
            raise UserError(
                f"Batches must have a first axis of training.batch_size, {training.batch_size}, "
                f"and the same shapes at every step, got {shapes} at step {step}."
            )
        return found

    capacity = min(training.steps_per_dispatch, training.steps)
    silent = not sys.stdout.isatty()
    step, before = 0, None
    with tqdm(total=training.steps, unit="step", file=sys.stdout, disable=silent) as bar:
        while step < training.steps:
            to_look = training.eval_every - step % training.eval_every
            count = min(capacity, to_look, training.steps - step)
            batches = [checked(step + i) for i in range(count)]
            batches += batches[-1:] * (capacity - count)  # one program, however many are wanted
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
            state, metrics = train_steps(state, jax.device_put(stacked, by_row), count)
            # While these are made, look at those before.
            if before is not None:
                bar.set_postfix_str(f"loss {check(*before):.4f}", refresh=False)
            before = (metrics, step, count)
            step += count
            bar.update(count)
            if step % training.eval_every == 0 or step == training.steps:
                loss = check(*before)
                # On one device: what looks need not know of others.
                found = look(_on_one_device(state.model))
                line = f"step {step}/{training.steps}  loss {loss:.4f}  {found}"
                tqdm.write(line.rstrip(), sys.stdout)
                sys.stdout.flush()
    return _on_one_device(state.model)


def _on_one_device(model: M) -> M:
    return jax.tree.map(lambda x: x.addressable_data(0) if eqx.is_array(x) else x, model)
