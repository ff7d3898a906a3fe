"""How far the best learning rates move with a model's width and depth.

    python benchmarks/transfer.py

Models of the preset `quick`'s blocks, 3 layers and 64 to 512 channels, or 2 to 16 layers and 64
channels, train on TinyShakespeare with both learning rates times 1/4, 1/2, 1, 2, 4 and 8, one after
the other. The loss is the mean over the last tenth of the steps, whose text is new to the model.
The best factor is where a parabola through the lowest loss and its neighbours, over the logarithm
of the factor, is lowest.

`--unscaled` shows the same without the shares of `gptlite.training.optimizer` for a model's shape.
"""

import argparse
import collections
import math

import equinox as eqx
import jax
import numpy as np
from common import print_machine, print_table

import gptlite as gl
from gptlite.config import ModelConfig, OptimizerConfig, TrainingConfig
from gptlite.machine.runtime import set_up_jax
from gptlite.training import optimizer as optimizer_module

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
KNOBS = ("learning_rate", "adam_learning_rate")
CONTEXT, BATCH_SIZE = 128, 8


def loss_of(
    layers: int, width: int, changed: dict[str, float], ids: np.ndarray, steps: int, seed: int
) -> float:
    """The mean of the last tenth of the steps."""
    jax.clear_caches()  # a process may have 65,530 maps of memory, and each program takes some
    config = ModelConfig(
        n_layers=layers,
        n_heads=max(1, width // 64),
        d_model=width,
        d_ff=2 * width,
        context_length=CONTEXT,
    )
    training = TrainingConfig(
        steps=steps, batch_size=BATCH_SIZE, log_every=max(1, steps // 10), eval_every=steps
    )
    rates = {knob: getattr(OptimizerConfig(), knob) * by for knob, by in changed.items()}
    make = eqx.filter_jit(lambda key: gl.GPT(config, int(ids.max()) + 1, key=key))
    model = make(jax.random.key(seed))
    train_steps = gl.TrainSteps(model, OptimizerConfig(**rates), training, gl.make_mesh())
    batches = gl.Batches(ids, BATCH_SIZE, CONTEXT, seed)
    try:
        progress = gl.fit(train_steps.init(model), train_steps, batches)
        last = collections.deque(progress, maxlen=1)[0]
    except gl.UserError as error:  # it has diverged
        print(error, flush=True)
        return math.inf
    assert last.train_loss is not None
    return last.train_loss


def best_factor(losses: dict[float, float]) -> float:
    """Its logarithm to the base 2; not finite if the lowest loss is at an end."""
    factors = sorted(losses)
    place = min(range(len(factors)), key=lambda i: losses[factors[i]])
    if place in (0, len(factors) - 1):
        return math.inf if place else -math.inf
    before, lowest, after = (losses[factors[place + i]] for i in (-1, 0, 1))
    step = math.log2(factors[place + 1] / factors[place])
    moved = step * (before - after) / (2 * (before - 2 * lowest + after))
    return math.log2(factors[place]) + moved


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256, 512])
    parser.add_argument("--depths", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--unscaled", action="store_true")
    arguments = parser.parse_args()
    set_up_jax(TrainingConfig().cpu_devices)
    if arguments.unscaled:
        optimizer_module._share_of_shape = lambda path, p, by_muon: 1.0
    corpus = gl.load_corpus("auto")
    ids = gl.split_corpus(corpus, gl.make_tokenizer("char", corpus)).train
    shapes = [(3, width) for width in arguments.widths]
    shapes += [(layers, 64) for layers in arguments.depths]
    rows = []
    for layers, width in shapes:
        for knob in KNOBS:
            losses = {}
            for factor in FACTORS:
                found = [
                    loss_of(layers, width, {knob: factor}, ids, arguments.steps, seed)
                    for seed in range(arguments.seeds)
                ]
                losses[factor] = float(np.mean(found))
                print(f"{layers} x {width}, {knob} x {factor:g}: {losses[factor]:.4f}", flush=True)
            best = best_factor(losses)
            told = f"2^{best:+.2f}" if math.isfinite(best) else "at an end, or beyond"
            shown = [f"{losses[factor]:.4f}" for factor in FACTORS]
            rows.append([f"{layers} x {width}", knob, *shown, told])
    print_machine()
    header = ["layers x width", "rate", *(f"times {factor:g}" for factor in FACTORS), "best"]
    print_table(header, rows)


if __name__ == "__main__":
    main()
