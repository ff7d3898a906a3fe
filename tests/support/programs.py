"""Write the programs of a dozen configs to a folder, as text, for tests/replay.py.

    python tests/support/programs.py FOLDER [--configs quick s] [--targets cpu h100:8]
        [--compile NAME ...]

A file CONFIG.TARGET.PROGRAM.mlir for each: the training step, the reading of a prompt, and the loop
that generates, as JAX lowers them. With --compile, those programs are compiled as well, to
NAME.hlo, in which names are numbers in the order of their appearance.
"""

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "2"

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from conftest import TINY, VARIANTS  # noqa: E402
from jaxlib import _hlo  # noqa: E402  # pyright: ignore[reportAttributeAccessIssue]

from gptlite.adapters import with_adapters  # noqa: E402
from gptlite.config import Config, OptimizerConfig, SamplingConfig, TrainingConfig  # noqa: E402
from gptlite.estimate.hardware import describe  # noqa: E402
from gptlite.estimate.step import lower_step  # noqa: E402
from gptlite.generation.generate import (  # noqa: E402
    DecodeInputs,
    PrefillInputs,
    PreparedModel,
    decode,
    prefill,
)
from gptlite.generation.sampling import Sampling  # noqa: E402
from gptlite.machine.mesh import abstract, make_mesh  # noqa: E402
from gptlite.machine.names import parse_lora  # noqa: E402
from gptlite.machine.pytrees import is_array  # noqa: E402
from gptlite.models.gpt import GPT  # noqa: E402
from gptlite.nn.kernels.decoding import rearranged  # noqa: E402
from gptlite.presets import PRESETS  # noqa: E402
from gptlite.runs.frozen import trainable  # noqa: E402
from gptlite.training.step import TrainSteps  # noqa: E402

VOCAB, SEPARATOR = 65, 0
# Devices, and the mesh of a training step: fsdp, tensor.
TARGETS = {"cpu": (1, 1), "h100:8": (4, 1), "v5e:2x4": (2, 2)}
ROWS = (1, 4)


def configs() -> dict[str, Config]:
    """A dozen: presets, and tiny models of every block."""
    found = {name: PRESETS[name][1] for name in ("quick", "portable", "gpu", "s", "m", "gpt2")}
    tiny = dataclasses.replace(TINY, d_model=32, n_heads=4, n_kv_heads=4, context_length=32)
    training = TrainingConfig(batch_size=8)
    for name, changes in VARIANTS.items():
        changes = changes | ({"n_kv_heads": 2} if "n_kv_heads" in changes else {})
        model = dataclasses.replace(tiny, **changes, dropout=0.1)
        optimizer = OptimizerConfig(name="adamw", clip_norm=1.0)
        found[name] = Config(model=model, optimizer=optimizer, training=training)
    begun = dataclasses.replace(training, init_from="another run")
    adapted = dataclasses.replace(tiny, lora="2:alpha=4")
    found["lora"] = Config(model=adapted, training=begun)
    return found


def shapes_of(config: Config) -> Any:
    def make(key):
        separator = SEPARATOR if config.model.separate_documents else None
        model = GPT(config.model, VOCAB, separator=separator, key=key)
        if config.model.lora is None:
            return model
        return with_adapters(model, parse_lora(config.model.lora), key=key)

    return eqx.filter_eval_shape(make, jax.random.key(0))


def on_arrays(function: Callable[..., Any], *arguments: Any) -> jax.stages.Lowered:
    """`function(*arguments)`, lowered, where shapes stand for arrays."""
    arrays, rest = eqx.partition(arguments, is_array)

    def call(arrays):
        return eqx.filter(function(*eqx.combine(arrays, rest)), eqx.is_array)

    return jax.jit(call).lower(arrays)


def lowered(config: Config, target: str) -> Iterator[tuple[str, Callable[[], jax.stages.Lowered]]]:
    """The programs of a config for the devices of a target, by their names."""
    devices = None if target == "cpu" else describe(target)[1]
    fsdp, tensor = TARGETS[target]
    mesh = make_mesh(fsdp=fsdp, tensor=tensor, devices=devices)
    model, context = shapes_of(config), config.model.context_length

    def train() -> jax.stages.Lowered:
        trained, rule = trainable(config, model), config.training
        if rule.batch_size % 8:  # of the devices
            rule = dataclasses.replace(rule, batch_size=16)
        steps = TrainSteps(model, config.optimizer, rule, mesh, trainable=trained)
        return lower_step(steps, model, context)

    yield "train", train
    # Text is generated on one device.
    one = make_mesh(devices=list(mesh.devices.flat[:1]))

    def here(tree: Any) -> Any:
        tree = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x, tree
        )
        return abstract(tree, one)

    for rows in ROWS:
        transposed = rows > 1 and target == "cpu"
        prepared = here(eqx.filter_eval_shape(rearranged, model, transposed))
        ids, length = here((jnp.zeros((rows, 16), jnp.int32), jnp.zeros(rows, jnp.int32)))
        inputs = PrefillInputs(PreparedModel(prepared, None), ids, length, length)

        def read(inputs: PrefillInputs = inputs) -> jax.stages.Lowered:
            return on_arrays(lambda inputs: prefill(inputs, None, context), inputs)

        def generate(inputs: PrefillInputs = inputs, rows: int = rows) -> jax.stages.Lowered:
            state = eqx.filter_eval_shape(lambda x: prefill(x, None, context)[0], inputs)
            settings = SamplingConfig(0.8, top_k=20, top_p=0.9)
            keys = here(jax.random.split(jax.random.key(0, impl="threefry2x32"), rows))
            count = here(jnp.zeros((), jnp.int32))
            sampling = here(Sampling.of([settings] * rows))
            given = DecodeInputs(inputs.prepared, keys, sampling, inputs.length, count, count)
            return on_arrays(decode, given, here(state))

        yield f"prefill-{rows}", read
        yield f"decode-{rows}", generate


def text_of(compiled: jax.stages.Compiled) -> str:
    """A compiled program, its large constants too, without what does not count: metadata, and
    names, of which each becomes its number in the order of appearance."""
    options = _hlo.HloPrintOptions()
    options.print_large_constants, options.print_metadata = True, False
    executable: Any = compiled.runtime_executable()
    text = "\n".join(module.to_string(options) for module in executable.hlo_modules())
    text = re.sub(r", frontend_attributes=\{[^}]*\}", "", text)
    text = re.sub(r"(?m)^HloModule \S+", "HloModule", text)
    numbers: dict[str, str] = {}
    return re.sub(
        r"%[\w.\-]+", lambda found: numbers.setdefault(found[0], f"%{len(numbers)}"), text
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    known = list(configs())
    parser.add_argument("--configs", nargs="+", default=known, choices=known)
    parser.add_argument("--targets", nargs="+", default=["cpu"], choices=list(TARGETS))
    parser.add_argument("--compile", nargs="*", default=[])
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.configs:
        config = configs()[name]
        for target in arguments.targets:
            for program, lower in lowered(config, target):
                path = f"{name}.{target.replace(':', '-')}.{program}"
                if arguments.compile and path not in arguments.compile:
                    continue
                found = lower()
                if arguments.compile:
                    (arguments.folder / f"{path}.hlo").write_text(text_of(found.compile()))
                else:
                    (arguments.folder / f"{path}.mlir").write_text(found.as_text())
                print(path, flush=True)


if __name__ == "__main__":
    main()
