"""What a training step takes, read from the compiled program: `python benchmarks/step_memory.py`.

Memory with each option that saves some, on one simulated device, and what eight of them exchange
in a step. Nothing is run.
"""

import argparse
import dataclasses
from typing import Any

from common import print_machine, print_table

from gptlite.estimate.step import lower_step

# Rows of the batch on a device.
ROWS = 4
EVERYTHING = 2**40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2")
    preset = parser.parse_args().preset

    from gptlite.estimate.hardware import HARDWARE
    from gptlite.estimate.program import work
    from gptlite.machine.runtime import set_up_jax

    set_up_jax(cpu_devices=8)
    print_machine()
    print(f"\nMemory of a step, {preset}, {ROWS} rows, one device, MiB\n")
    variants: dict[str, tuple[dict[str, str], dict[str, str], int | None]] = {
        "default": ({}, {}, None),
        "all logits at once": ({}, {}, EVERYTHING),
        "--model.stack scan": ({"stack": "scan"}, {}, None),
        "--model.remat attention": ({"remat": "attention"}, {}, None),
        "--model.remat block": ({"remat": "block"}, {}, None),
        "--optimizer.state-dtype bfloat16": ({}, {"state_dtype": "bfloat16"}, None),
    }
    rows = []
    for name, (model, optimizer, most) in variants.items():
        compiled = compile_step(preset, 1, model, optimizer, most)
        memory: Any = compiled.memory_analysis()
        sizes = (memory.argument_size_in_bytes, memory.temp_size_in_bytes)
        rows.append([f"`{name}`" if "--" in name else name, *(f"{x / 2**20:,.0f}" for x in sizes)])
    print_table(["", "training state", "temporary"], rows)

    print(f"\nWhat a device receives in a step, {preset} in float32, --mesh.fsdp 8\n")
    rows = []
    for name in ("adamw", "muon"):
        compiled = compile_step(preset, 8, {}, {"name": name}, None)
        # The device decides over times, which are of no interest here.
        exchanged = work(str(compiled.as_text()), HARDWARE["h100"]).collectives
        for kind, (count, size) in sorted(exchanged.items()):
            rows.append([name, kind, f"{count:.0f}", f"{size / 2**20:,.0f}"])
    print_table(["optimizer", "collective", "how many", "MiB"], rows)


def compile_step(
    preset: str,
    devices: int,
    model_changes: dict[str, str],
    optimizer_changes: dict[str, str],
    most: int | None,
) -> Any:
    """The compiled step, with the batch divided among so many devices, which share the parameters.
    `most`: the logits that a device may keep at once."""
    import equinox as eqx
    import jax

    from gptlite.machine.mesh import make_mesh
    from gptlite.models.gpt import GPT
    from gptlite.nn.kernels import head
    from gptlite.presets import PRESETS
    from gptlite.training.step import TrainSteps

    config = PRESETS[preset][1]
    shape: Any = dataclasses.replace(config.model, **model_changes)
    optimizer: Any = dataclasses.replace(config.optimizer, **optimizer_changes)
    # Several in float32: the product that CPUs use for the gradients of weights in bfloat16 is one
    # that XLA does not divide, and of no interest on other devices.
    training = dataclasses.replace(
        config.training,
        batch_size=ROWS * devices,
        accumulation=1,
        compute_dtype="bfloat16" if devices == 1 else "float32",
    )
    vocab = (50257, 50304) if config.data.tokenizer.startswith("tiktoken") else (65, 65)
    mesh = make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    model = eqx.filter_eval_shape(
        lambda key: GPT(shape, vocab[0], padded_vocab_size=vocab[1], key=key), jax.random.key(0)
    )
    train_steps = TrainSteps(model, optimizer, training, mesh)
    default = head.MAX_LOGITS
    head.MAX_LOGITS = default if most is None else most
    try:
        return lower_step(train_steps, model, shape.context_length).compile()
    finally:
        head.MAX_LOGITS = default


if __name__ == "__main__":
    main()
