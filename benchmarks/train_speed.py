"""Training speed against GPT-2 in plain PyTorch and Hugging Face's: `python
benchmarks/train_speed.py`.

Same shape, batch, context and optimizer (AdamW); no dropout. On a CPU, gptlite computes M's
gradient in parts that it adds up. Plain PyTorch computes it at once and also in parts of 8 windows,
as it stands and compiled. Each contender has a process of its own, and they run in alternation.
Then the same with gptlite's default block.
"""

import argparse
import dataclasses
import statistics
from typing import Any

import huggingface
from common import (
    Contender,
    Round,
    Shape,
    interleave,
    make_matmul,
    make_shape,
    print_machine,
    print_table,
    speedup,
    spread,
    timed,
)

# Windows of one part of plain PyTorch's gradient: about as many as the cores' caches like.
MICRO_BATCH = {"S": 12, "M": 8}
STEPS = {"S": 40, "M": 1}


def make_plain_round(*args: Any) -> Round:
    """`plain_torch.make_train_round`, imported here so that no other contender imports PyTorch."""
    from plain_torch import make_train_round

    return make_train_round(*args)


def make_round(shape: Shape, dtype: str, steps: int) -> Round:
    """gptlite's training step, in dispatches of `steps`."""
    import equinox as eqx
    import jax
    import numpy as np

    from gptlite.machine.mesh import make_mesh
    from gptlite.machine.runtime import set_up_jax
    from gptlite.models.gpt import GPT
    from gptlite.presets import PRESETS
    from gptlite.training.step import TrainSteps

    preset = PRESETS["s"][1]
    training = dataclasses.replace(
        preset.training, batch_size=shape.batch_size, compute_dtype=dtype
    )
    set_up_jax(training.cpu_devices)
    adamw = dataclasses.replace(preset.optimizer, clip_norm=None)
    model = eqx.filter_jit(GPT)(shape.model, shape.vocab_size, key=jax.random.key(0))
    train_steps = TrainSteps(model, adamw, training, make_mesh())
    state = train_steps.init(model)
    rows = (steps, shape.batch_size, shape.model.context_length + 1)
    windows = np.random.default_rng(0).integers(0, shape.vocab_size, rows, np.int32)

    def dispatch():
        nonlocal state
        state, metrics = train_steps(state, windows, steps)
        metrics.loss.block_until_ready()

    return lambda: timed(dispatch, 1) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["S", "M"], choices=["S", "M"])
    dtypes = ["float32", "bfloat16"]
    parser.add_argument("--dtypes", nargs="+", default=dtypes, choices=dtypes)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print_machine()
    for name in arguments.shapes:
        for dtype in arguments.dtypes:
            compare(name, dtype, arguments.rounds)


def compare(name: str, dtype: str, rounds: int) -> None:
    """One table: a shape in a number format."""
    limit = "matmul"
    gpt2, default = make_shape(name, "gpt2"), make_shape(name, "default")
    accumulation = gpt2.batch_size // MICRO_BATCH[name]
    steps = STEPS[name]
    peers = [
        Contender(
            "plain PyTorch" + ", compiled" * compiled + ", in parts" * (parts > 1),
            make_plain_round, gpt2, dtype, parts, steps, compiled,
        )
        for compiled in (False, True)
        for parts in sorted({1, accumulation})
    ]  # fmt: skip
    peers.append(Contender("Hugging Face", huggingface.make_train_round, gpt2, dtype, steps))
    contenders = [
        Contender(limit, make_matmul, dtype),
        *peers,
        Contender("gptlite, GPT-2's block", make_round, gpt2, dtype, steps),
        Contender("gptlite, default block", make_round, default, dtype, steps),
    ]
    seconds = interleave(contenders, rounds)
    peaks = {contender.name: contender.close() for contender in contenders}
    limit_flops = 1 / statistics.median(seconds[limit])
    best = min((peer.name for peer in peers), key=lambda peer: statistics.median(seconds[peer]))
    rows = []
    for contender in contenders[1:]:
        of = default if "default" in contender.name else gpt2
        times = seconds[contender.name]
        flops = of.flops_per_token * of.tokens / statistics.median(times)
        rows.append(
            [
                contender.name,
                spread([of.tokens / t for t in times]),
                speedup(seconds, best, contender.name, ".2f"),
                f"{flops / 1e9:.0f}",
                f"{flops / limit_flops:.2f}",
                f"{peaks[contender.name]:,.0f}",
            ]
        )
    print(
        f"{name}, {dtype}: batch {gpt2.batch_size} x {gpt2.model.context_length}, {rounds} rounds; "
        f"{dtype} products here: {limit_flops / 1e9:.0f} GFLOP/s"
    )
    over = "times the best peer"
    print_table(["", "tokens/s", over, "GFLOP/s", "of products", "peak MiB"], rows)


if __name__ == "__main__":
    main()
