"""Generate text with a trained model: `python sample.py --prompt "ROMEO:"`."""

import contextlib
import math
import sys
from pathlib import Path

from gptlite.cli import SampleArguments, exit_on_error, parse_sample
from gptlite.errors import UserError, require
from gptlite.machine.progress import log, printable

# Bytes. A model reads the end of a long prompt only.
MAX_PROMPT = 2**22


def main() -> None:
    with exit_on_error(debug="--debug" in sys.argv):
        sample(parse_sample(sys.argv[1:]))


def sample(arguments: SampleArguments) -> None:
    # Imported here, because --help should not wait for JAX.
    import jax
    import jax.numpy as jnp

    from gptlite.generation.generate import stream
    from gptlite.generation.text import TextStream
    from gptlite.machine.runtime import set_up_jax
    from gptlite.runs.load import load_any

    # Two, as in training: for more, generating is too little work.
    set_up_jax(cpu_devices=math.gcd(2, arguments.num_samples))
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for the generated text
        run = load_any(arguments.run, arguments.weights, arguments.model.named)
    prompt = read_prompt(arguments)
    if not prompt:
        raise UserError("The prompt is empty: give at least one character.")

    ids, context = run.tokenizer.encode(prompt), run.config.model.context_length
    ids = [*run.tokenizer.start_ids, *ids.tolist()]
    if len(ids) > context:
        log(f"the prompt has {len(ids):,} tokens: the model reads the last {context:,}", sys.stderr)
    ids = jnp.asarray(ids[-context:])
    rows = jnp.arange(arguments.num_samples)
    # A key per row, so that the first sample is the same however many are asked for.
    key = jax.random.key(arguments.seed, impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
    prompts = jnp.tile(ids, (arguments.num_samples, 1))

    show = str
    if sys.stdout.isatty():  # the prompt is shown on a terminal only, and is not part of the output
        show = printable  # a model can generate any character
        print(show(prompt), end="", file=sys.stderr, flush=True)
    texts = [TextStream(run.tokenizer, arguments.stop) for _ in range(arguments.num_samples)]
    pieces: list[list[str]] = [[] for _ in texts]
    for chunk in stream(
        run.model, prompts, arguments.max_new_tokens, arguments.sampling, keys=keys
    ):
        for text, piece, row in zip(texts, pieces, jax.device_get(chunk), strict=True):
            piece.append(text.feed(row))
        print(show(pieces[0][-1]), end="", flush=True)  # the first streams, the others wait for it
        if all(text.stopped for text in texts):
            break
    for text, piece in zip(texts, pieces, strict=True):
        piece.append(text.finish())
    print(show(pieces[0][-1]))
    for piece in pieces[1:]:
        print("---", show("".join(piece)), sep="\n")


def read_prompt(arguments: SampleArguments) -> str:
    """From --prompt, --prompt-file or standard input."""
    if arguments.prompt is not None:
        return arguments.prompt
    try:
        # Bytes, not text mode: line ends stay as they are.
        if arguments.prompt_file is not None:
            with Path(arguments.prompt_file).open("rb") as file:
                content = file.read(MAX_PROMPT + 1)
        elif sys.stdin is None:
            return ""
        else:
            if sys.stdin.isatty():
                print("type the prompt, then Ctrl-D", file=sys.stderr)
            content = sys.stdin.buffer.read(MAX_PROMPT + 1)
        require(len(content) <= MAX_PROMPT, f"The prompt has more than {MAX_PROMPT:,} bytes.")
        return content.decode("utf-8").removeprefix("\ufeff")  # a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        source = arguments.prompt_file or "standard input"
        raise UserError(f"The prompt cannot be read from {source}: {error}.") from error


if __name__ == "__main__":
    main()
