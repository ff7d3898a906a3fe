"""Check a block of your own: `gptlite check-block FILE.py:CLASS`."""

import dataclasses
import json
import sys
from typing import Annotated, Any

import tyro

from gptlite.cli import CustomFiles, exit_on_error, import_jax, parse_words
from gptlite.config import Config, ModelConfig
from gptlite.custom import check_files, find_custom, load_class, load_custom, with_custom
from gptlite.errors import require
from gptlite.machine.names import is_custom, parse_options, split_options
from gptlite.research.small import SMALL

Custom = tyro.conf.arg(metavar="FILE.py:CLASS[:rank=4]")


def check(
    block: Annotated[str | None, tyro.conf.Positional, Custom] = None,
    *,
    model: ModelConfig = SMALL,
    seq: int | None = None,
    sees: str | None = None,
    reference: Annotated[str | None, Custom] = None,
    zero_grad: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    skip: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    list_laws: Annotated[bool, tyro.conf.arg(name="list")] = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    custom: CustomFiles = (),
    bidirectional: bool = False,
    debug: bool = False,
) -> None:
    """Check a block of your own, built as CLASS(config, key=key); without one, the whole model that
    the options --model describe.

    Args:
        block: The file and the class, with the options of the class.
        model: The config. Its defaults here are small.
        seq: Tokens in a sequence: more than any window, chunk or table of the block. Default: 41,
            or 9 more than the largest number up to 256 in the block's fields and code.
        sees: What an output must depend on, and nothing else: "all earlier", or "window(64)", the
            last 64 inputs with its own. Without it, seeing too little is not found.
        reference: Another form of the block, with the same parameters, which must give the same
            outputs, gradients and weights, and vary as much with dropout.
        zero_grad: A parameter whose gradient is zero by design; may be given several times.
        skip: A law that is left out; may be given several times.
        list_laws: List the laws, and end.
        as_json: Print the result as JSON.
        custom: A file with custom blocks, which may be executed; may be given several times. The
            class may then be named alone.
        bidirectional: Check an encoder's block, in which every output depends on every input.
        debug: Show where in the code an error came from.
    """
    import_jax()
    # Imported here, because --help should not wait for JAX.
    from gptlite.models.gpt import GPT
    from gptlite.research.check_block import CheckError, check_block
    from gptlite.research.laws import LAWS, sentence

    if list_laws:
        for name in LAWS:
            print(f"{name:14}{sentence(name)}")
        return

    class Model(GPT):
        def __init__(self, config: ModelConfig, *, key: Any):
            separator = 0 if config.separate_documents else None
            super().__init__(config, 13, separator=separator, key=key)

    check_files(custom)
    config = load_custom(with_custom(Config(model=model), custom).model)
    loaded, options = load_block(block, custom) if block else (Model, {})
    other = None
    if reference is not None:
        other, own = load_block(reference, custom)
        require(not own, f"--reference takes the options of the block, got {reference!r}.")
    try:
        report = check_block(
            loaded,
            config=config,
            options=options,
            causal=False if bidirectional else None,
            seq=seq,
            sees=sees,
            reference=other,
            zero_grad=zero_grad,
            skip=skip,
        )
        print(json.dumps(dataclasses.asdict(report)) if as_json else report)
    except CheckError as error:
        print(json.dumps({"name": error.name, "failures": error.failures}) if as_json else error)
        sys.exit(1)


def load_block(name: str, custom: tuple[str, ...]) -> tuple[type, dict[str, Any]]:
    """The class `FILE.py:CLASS`, and the options that follow it."""
    class_name, texts = split_options(name)
    require(
        is_custom(class_name),
        f"A block is named as FILE.py:CLASS, its options as :NAME=VALUE, got {name!r}.",
    )
    loaded = load_class(find_custom(class_name, custom))
    return loaded, parse_options(class_name, loaded, texts)


def main() -> None:
    with exit_on_error(debug="--debug" in sys.argv):
        parse_words(check, sys.argv[1:])
