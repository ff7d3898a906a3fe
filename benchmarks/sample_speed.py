"""Generation speed against Hugging Face's `generate`: `python benchmarks/sample_speed.py`.

Both with a key/value cache, top-k 50, float32, from one token to the end of the context. Each
contender has a process of its own, and they run in alternation. Then gptlite's default block.
"""

import argparse
import math
import statistics

import huggingface
from common import (
    Contender,
    Round,
    Shape,
    interleave,
    make_memory,
    make_shape,
    print_machine,
    print_table,
    speedup,
    spread,
    timed,
)

REPEATS = {"S": 20, "M": 4}


def make_round(shape: Shape, batch_size: int, new_tokens: int, repeats: int) -> Round:
    """gptlite's `generate`."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from gptlite.config import SamplingConfig
    from gptlite.generation.generate import generate, prepare
    from gptlite.machine.runtime import set_up_jax
    from gptlite.models.gpt import GPT

    set_up_jax(cpu_devices=math.gcd(2, batch_size))  # as sample.py
    model = eqx.filter_jit(GPT)(shape.model, shape.vocab_size, key=jax.random.key(0))
    model = prepare(model, batch_size)
    prompt = jnp.zeros((batch_size, 1), jnp.int32)
    keys = jax.random.split(jax.random.key(1), batch_size)
    config = SamplingConfig(top_k=50)

    def sample():
        made = generate(model, prompt, new_tokens, config, keys=keys).block_until_ready()
        assert made.shape == (batch_size, new_tokens)

    return lambda: timed(sample, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["S", "M"], choices=["S", "M"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print_machine()
    for name in arguments.shapes:
        for batch_size in arguments.batches:
            compare(name, batch_size, arguments.rounds)


def compare(name: str, batch_size: int, rounds: int) -> None:
    """One table: a shape at a batch size."""
    gpt2, default = make_shape(name, "gpt2"), make_shape(name, "default")
    new_tokens = gpt2.model.context_length - 1
    peer, limit = "Hugging Face", "memory"
    work = (batch_size, new_tokens)
    contenders = [
        Contender(limit, make_memory),
        Contender(peer, huggingface.make_sample_round, gpt2, *work, 2),
        Contender("gptlite, GPT-2's block", make_round, gpt2, *work, REPEATS[name]),
        Contender("gptlite, default block", make_round, default, *work, REPEATS[name]),
    ]
    seconds = interleave(contenders, rounds)
    peaks = {contender.name: contender.close() for contender in contenders}
    bandwidth = 1 / statistics.median(seconds[limit])
    tokens = batch_size * new_tokens
    rows = [
        [
            contender.name,
            spread([tokens / t for t in seconds[contender.name]]),
            speedup(seconds, peer, contender.name, ".1f"),
            f"{peaks[contender.name]:,.0f}",
        ]
        for contender in contenders[1:]
    ]
    print(
        f"{name}, batch {batch_size}, {new_tokens} new tokens, {rounds} rounds; reading each "
        f"weight once per token from memory ({bandwidth / 1e9:.0f} GB/s) would give "
        f"{batch_size * bandwidth / (4 * gpt2.weights):,.0f} tokens/s"
    )
    print_table(["", "tokens/s", "speedup", "peak MiB"], rows)


if __name__ == "__main__":
    main()
