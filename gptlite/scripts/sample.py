"""Generate text with a trained model: `python sample.py --prompt "ROMEO:"`."""

import contextlib
import math
import sys

import gptlite as gl


def sample(arguments: gl.SampleArguments) -> None:
    # Two devices of a CPU, as in training: for more, generating is too little work.
    gl.set_up_jax(cpu_devices=math.gcd(2, arguments.num_samples))
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for the generated text
        run = gl.load(arguments.run, arguments.weights, custom=arguments.custom)
    prompt = gl.read_prompt(arguments)
    length, most = len(gl.prompt_ids(run.tokenizer, prompt)), run.config.model.context_length
    if length > most:
        gl.log(f"the prompt has {length:,} tokens: the model reads the last {most:,}", sys.stderr)

    show = str
    if sys.stdout.isatty():  # the prompt is shown on a terminal only, and is not part of the output
        show = gl.printable  # a model can generate any character
        print(show(prompt), end="", file=sys.stderr, flush=True)
    others: list[list[str]] = []
    for first, *rest in gl.stream_texts(
        run.model,
        run.tokenizer,
        prompt,
        arguments.num_samples,
        max_new_tokens=arguments.max_new_tokens,
        sampling=arguments.sampling,
        seed=arguments.seed,
        stop=arguments.stop,
    ):
        print(show(first), end="", flush=True)  # the first streams, the others wait for it
        others.append(rest)
    print()
    for pieces in zip(*others, strict=True):
        print("---", show("".join(pieces)), sep="\n")


def main() -> None:
    gl.run_script(sample, gl.parse_sample)
