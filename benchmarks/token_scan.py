"""What a loop over tokens costs in training, against a form for whole sequences:
`python benchmarks/token_scan.py gated_deltanet --context 2048`, with an attention that has both.

The gradient of one layer of the preset `quick`, for 2,048 tokens, on one core, by turns: in one
call, and with its cache, token by token, under `lax.scan`.
"""

import argparse
import os

from common import Contender, Round, interleave, print_table, speedup, spread


def layer(name: str, context: int, form: str) -> Round:
    """Rounds of one gradient."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import dataclasses
    import time

    import equinox as eqx
    import jax
    import jax.numpy as jnp
    from jax import lax

    from gptlite.custom import load_custom
    from gptlite.models.build import make_part
    from gptlite.nn import Context
    from gptlite.presets import PRESETS

    config = dataclasses.replace(PRESETS["quick"][1].model, attention=name)
    block = make_part("attention", load_custom(config), jax.random.key(0))
    batch = max(1, 2048 // context)
    x = jax.random.normal(jax.random.key(1), (batch, context, config.d_model))

    def whole(block, x):
        return block(x)[0]

    def scanned(block, x):
        def step(cache, token):
            place, x = token
            y, cache = block(x[:, None], cache, Context(start=place))
            return cache, y[:, 0]

        cache = block.init_cache((batch,), context, x.dtype)
        tokens = jnp.arange(context), jnp.moveaxis(x, 1, 0)
        return jnp.moveaxis(lax.scan(step, cache, tokens)[1], 0, 1)

    run = {"whole sequences": whole, "token by token": scanned}[form]
    grad = eqx.filter_jit(eqx.filter_grad(lambda block, x: jnp.sum(jnp.sin(run(block, x)))))
    jax.block_until_ready(grad(block, x))

    def work() -> float:
        start = time.perf_counter()
        jax.block_until_ready(grad(block, x))
        return time.perf_counter() - start

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attention", help="a name, or FILE.py:CLASS")
    parser.add_argument("--context", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    forms = ("whole sequences", "token by token")
    given = arguments.attention, arguments.context
    contenders = [Contender(form, layer, *given, form) for form in forms]
    seconds = interleave(contenders, arguments.rounds)
    print_table(
        ["", "ms a gradient", "times as long", "peak MiB"],
        [
            [
                contender.name,
                spread([1000 * s for s in seconds[contender.name]], ".1f"),
                speedup(seconds, contender.name, forms[0], ".1f"),
                f"{contender.close():,.0f}",
            ]
            for contender in contenders
        ],
    )


if __name__ == "__main__":
    main()
