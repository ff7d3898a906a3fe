"""Check a block of your own: `gptlite check-block FILE.py:CLASS`."""

import sys
from typing import Annotated

import tyro

from gptlite.cli import CustomFiles, exit_on_error, import_jax, parse_words
from gptlite.custom import check_files, find_custom, load_class
from gptlite.errors import require
from gptlite.machine.names import is_custom, parse_options, split_options


def check(
    block: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.py:CLASS[:rank=4]")],
    *,
    zero_grad: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    custom: CustomFiles = (),
    bidirectional: bool = False,
    debug: bool = False,
) -> None:
    """Check a block of your own, built as CLASS(config, key=key).

    Args:
        block: The file and the class, with the options of the class.
        zero_grad: A parameter whose gradient is zero by design; may be given several times.
        custom: A file with custom blocks, which may be executed; may be given several times. The
            class may then be named alone.
        bidirectional: Check an encoder's block, in which every output depends on every input.
        debug: Show where in the code an error came from.
    """
    import_jax()
    # Imported here, because --help should not wait for JAX.
    from gptlite.research.check_block import CheckError, check_block

    name, texts = split_options(block)
    require(is_custom(name), f"A block is named as FILE.py:CLASS, got {block!r}.")
    check_files(custom)
    loaded = load_class(find_custom(name, custom))
    options = parse_options(name, loaded, texts)
    try:
        causal = False if bidirectional else None
        print(check_block(loaded, options=options, causal=causal, zero_grad=zero_grad))
    except CheckError as error:
        print(error)
        sys.exit(1)


def main() -> None:
    with exit_on_error(debug="--debug" in sys.argv):
        parse_words(check, sys.argv[1:])
