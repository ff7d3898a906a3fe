"""A model's memory and time, untrained: `gptlite estimate PRESET --for h100:8`."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from gptlite.cli import DEFAULT_PRESET, CustomFiles, PresetName, parse_config, run_script
from gptlite.config import Config
from gptlite.errors import require


@dataclass(frozen=True)
class EstimateArguments:
    """Print a model as a table, with parameters, FLOPs and memory; or, for devices that need not be
    there, what a step of its training takes.

    The options below start from PRESET. Those given after it change it, as with `gptlite train`."""

    preset: PresetName = DEFAULT_PRESET  # pyright: ignore[reportInvalidTypeForm]

    devices: Annotated[str | None, tyro.conf.arg(name="for")] = None
    """Compile the training step for these devices, and print memory, whether it fits, FLOPs, what
    devices exchange, and the least time that a step can take. h100:8, a100:8 or b200:8 are so many
    GPUs, v5e:4x4, v5p:8x8x8 or v6e:16x16 a slice of a TPU. Nothing is run. Needs the compilers:
    pip install "gptlite-jax[aot]"."""

    fit: Literal["batch"] | None = None
    """With --for: look for the largest batch that fits, beginning with --training.batch-size, and
    print what that takes."""

    init_from: str | None = None
    """The shape and the tokenizer of a run, its folder or its name in runs/, or of hf:FOLDER or
    hf:NAME, a model in Hugging Face's format; as --init-from of
    `gptlite train`."""

    custom: CustomFiles = ()
    """A file with custom blocks, which may be executed; may be given several times."""

    debug: bool = False
    """Show where in the code an error came from."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)

    def __post_init__(self):
        require(
            self.fit is None or self.devices is not None,
            f"--fit {self.fit} needs --for: it looks for what fits on those devices.",
        )


def parse_estimate(argv: Sequence[str]) -> EstimateArguments:
    """The command line. `argv` is without the program's name."""
    arguments, preset = parse_config(EstimateArguments, argv, resumes=False)
    require(
        arguments.preset == preset,
        f"The preset comes first: gptlite estimate {arguments.preset} ...",
    )
    return arguments


def estimate(arguments: EstimateArguments) -> None:
    # Imported here, because --help should not wait for JAX.
    from gptlite.custom import load_custom
    from gptlite.estimate.hardware import describe
    from gptlite.estimate.largest import largest_step
    from gptlite.estimate.report import report
    from gptlite.estimate.step import compile_step, rows_at_once
    from gptlite.inspect.summary import summary
    from gptlite.machine.mesh import check_tensor, make_mesh
    from gptlite.machine.runtime import set_up_jax, usable_cpu_devices
    from gptlite.runs.corpora import load_corpus
    from gptlite.runs.find import find_run
    from gptlite.runs.frozen import trainable
    from gptlite.runs.model import abstract_model
    from gptlite.runs.tokenizers import load_tokenizer, make_tokenizer
    from gptlite.training.step import TrainSteps

    config, training = arguments.config, arguments.config.training
    hardware = devices = None
    if arguments.devices is not None:
        hardware, devices = describe(arguments.devices)
    set_up_jax(usable_cpu_devices(training, config.mesh) if hardware is None else 1)
    config = dataclasses.replace(config, model=load_custom(config.model))
    begun_from = arguments.init_from
    if begun_from is not None and begun_from.startswith("hf:"):
        from gptlite.hugging_face.folder import load_hf_tokenizer
        from gptlite.hugging_face.hub import find_folder

        tokenizer = load_hf_tokenizer(find_folder(begun_from.removeprefix("hf:")))
    elif begun_from is not None:
        tokenizer = load_tokenizer(find_run(begun_from))
    else:
        tokenizer = make_tokenizer(config.data.tokenizer, load_corpus(config.data.corpus))
    model = abstract_model(config.model, tokenizer)
    trained = trainable(config, model)
    mesh = make_mesh(**vars(config.mesh), devices=devices)
    check_tensor(mesh.shape["tensor"], config.model)

    def make_steps(rows: int) -> TrainSteps:
        rule = dataclasses.replace(training, batch_size=rows)
        return TrainSteps(model, config.optimizer, rule, mesh, trainable=trained)

    steps = make_steps(training.batch_size)
    if hardware is None:
        rows = rows_at_once(steps, config.model.context_length + 1)
        print(summary(model, batch_size=rows, trained=trained))
    elif arguments.fit == "batch":
        print(report(largest_step(model, make_steps, training.batch_size, hardware), hardware))
    else:
        print(report(compile_step(model, steps), hardware))


def main() -> None:
    run_script(estimate, parse_estimate)
