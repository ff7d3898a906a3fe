"""One model trained from several seeds at the same time, in one compiled program.

The seeds have an axis of their own, which the devices share out; each device runs its seeds side by
side (`jax.vmap`). What seed s gets is what it would get alone: `train.py --training.seed s` gives
the same up to the order of sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from gptlite.config import Config
from gptlite.runs.frozen import trainable
from gptlite.runs.model import make_model
from gptlite.sharding import AXES, SEEDS
from gptlite.text.batches import Batches
from gptlite.text.tokenizer import Tokenizer
from gptlite.text.tokens import Split
from gptlite.training.evaluate import Evaluation
from gptlite.training.fit import fit
from gptlite.training.step import TrainSteps


def seeds_mesh(models: int) -> Mesh:
    """A mesh whose devices train `models` models in parallel: the axis `seeds`, and the other axes
    with a single device."""
    devices = jax.devices()[: min(jax.device_count(), models)]
    names = (SEEDS, *AXES)
    shape = (len(devices), 1, 1, 1)
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 4, devices=devices)


@dataclass(frozen=True)
class SeedsProgress:
    """The state after a dispatch."""

    step: int
    steps: int
    """Steps in total."""
    val_losses: Sequence[float] | None
    """Where an evaluation was due: nats per token, one per seed."""
    step_seconds: float
    """Spent on steps so far, by all seeds together, without compilation and evaluations."""


def fit_seeds(
    config: Config,
    tokenizer: Tokenizer,
    seeds: Sequence[int],
    split: Split,
) -> Iterator[SeedsProgress]:
    """Train the model of `config`, once for each of `seeds`, which replace `training.seed`.

    A seed whose loss is no longer finite continues. The steps are compiled before this returns.

    **Raises:** `UserError` if the text is too short.
    """
    training, context = config.training, config.model.context_length
    seeds, mesh = list(seeds), seeds_mesh(len(seeds))
    # Every device trains the same number of seeds. Copies of the last seed fill the gaps, and are
    # not reported.
    filled = [*seeds, *seeds[-1:] * (-len(seeds) % mesh.shape[SEEDS])]
    batches = [Batches(split.train, training.batch_size, context, seed) for seed in filled]

    @eqx.filter_jit
    @eqx.filter_vmap
    def draw(seed):  # as train.py does
        return make_model(config.model, tokenizer, key=jax.random.split(jax.random.key(seed))[0])

    models = draw(jnp.asarray(filled, jnp.int32))
    one = jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, models)
    train_steps = TrainSteps(
        one, config.optimizer, training, mesh, trainable=trainable(config, one), seeds=filled
    )
    evaluate = Evaluation(split.validation, context, mesh)
    fitting = fit(
        train_steps.init(models),
        train_steps,
        lambda step: np.stack([batch(step) for batch in batches]),
        stop_on_nonfinite=False,
    )

    def loop() -> Iterator[SeedsProgress]:
        for progress in fitting:
            losses = None
            if progress.evaluation_due:
                losses = evaluate(progress.state.model)[: len(seeds)].tolist()
            seconds = progress.position.step_seconds
            yield SeedsProgress(progress.step, training.steps, losses, seconds)

    return loop()
