"""What layers with a state cost: `python benchmarks/states.py train`, or `generate`, or `operator`.

train: tokens/s of training, of the preset `quick` with each attention, in batches of 2,048 tokens.

generate: the time of a token, one after the other, when 1,000 tokens or more have been read, and
the memory that the cache of the layers has. The cache is empty, which costs as much.

operator: the gradient of `linear_recurrence`, in chunks, against the same formula token by token:
under `lax.scan`, and as a loop in PyTorch, written as in the papers.

Each contender has a process of its own, and they run in alternation.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from common import (
    Contender,
    Round,
    interleave,
    print_machine,
    print_table,
    speedup,
    spread,
    timed,
)

# Of a batch.
TOKENS = 2048
STATES = ("linear", "retention", "gla", "mamba2", "deltanet", "gated_deltanet", "kda", "rwkv7")
MIXERS = ("full", "sliding", *STATES, "gated_deltanet+3:full", "kda+3:full")
# Rules of the operator: what a token does to a state.
RULES = ("decay for each row", "gated delta rule", "two vectors")


def make_config(mixer: str, context: int) -> Any:
    """`mixer`: an attention, and perhaps `+N:NAME` for every Nth layer."""
    import dataclasses

    from gptlite.custom import load_custom
    from gptlite.presets import PRESETS

    attention, _, every = mixer.partition("+")
    config = dataclasses.replace(
        PRESETS["quick"][1].model,
        attention=attention,
        attention_every=every or None,
        context_length=context,
    )
    return load_custom(config)


def train(mixer: str, context: int, steps: int) -> Round:
    """Seconds of a step."""
    import dataclasses

    import equinox as eqx
    import jax
    import numpy as np

    from gptlite.machine.mesh import make_mesh
    from gptlite.machine.runtime import set_up_jax
    from gptlite.models.gpt import GPT
    from gptlite.presets import PRESETS
    from gptlite.training.step import TrainSteps

    preset = PRESETS["quick"][1]
    rows = TOKENS // context
    training = dataclasses.replace(preset.training, batch_size=rows)
    set_up_jax(training.cpu_devices if rows > 1 else 1)
    model = eqx.filter_jit(GPT)(make_config(mixer, context), 65, key=jax.random.key(0))
    train_steps = TrainSteps(model, preset.optimizer, training, make_mesh())
    state = train_steps.init(model)
    windows = np.random.default_rng(0).integers(0, 65, (steps, rows, context + 1), np.int32)

    def dispatch() -> None:
        nonlocal state
        state, metrics = train_steps(state, windows, steps)
        metrics.loss.block_until_ready()

    return lambda: timed(dispatch, 1) / steps


def generate(mixer: str, read: int, new_tokens: int) -> Round:
    """Seconds of a token. The first round prints what the cache has."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    from jax import lax

    from gptlite.generation.generate import prepare
    from gptlite.machine.pytrees import size_of
    from gptlite.machine.runtime import set_up_jax
    from gptlite.models.gpt import GPT

    set_up_jax(cpu_devices=1)
    config = make_config(mixer, read + new_tokens)
    model = eqx.filter_jit(GPT)(config, 65, key=jax.random.key(0))
    cache = eqx.tree_at(
        lambda cache: cache.length, model.init_cache(), jnp.asarray(read, jnp.int32)
    )
    cache = jax.tree.map(jnp.copy, cache)  # an empty one's arrays may be one
    model = prepare(model, 1).model
    print(f"{mixer}, {read:,} tokens: {size_of(cache.layers) / 2**20:.2f} MiB in the cache")

    @eqx.filter_jit(donate="all-except-first")
    def run(model: GPT, cache: Any) -> Any:
        def token(_: Any, carry: Any) -> Any:
            ids, cache = carry
            hidden, cache = model.extend(ids, cache)
            return jnp.argmax(model.logits(hidden), axis=-1).astype(ids.dtype), cache

        _, cache = lax.fori_loop(0, new_tokens, token, (jnp.zeros(1, jnp.int32), cache))
        return eqx.tree_at(lambda cache: cache.length, cache, jnp.asarray(read, jnp.int32))

    def work() -> float:
        nonlocal cache
        start = time.perf_counter()
        cache = jax.block_until_ready(run(model, cache))
        return (time.perf_counter() - start) / new_tokens

    return work


def drawn(rule: str, seq: int) -> dict[str, Any]:
    """Tokens of 2 heads of 64 channels, float32: what each rule has."""
    import numpy as np

    random = np.random.default_rng(0)

    def vectors(size: int = 64) -> Any:
        return random.normal(size=(2, seq, size)).astype(np.float32)

    def decays(size: int) -> Any:
        return -np.exp(vectors(size) - 3)

    def unit(x: Any) -> Any:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    tokens = {"query": vectors() / 8, "value": vectors()}
    if rule == "decay for each row":
        return tokens | {"key": vectors(), "log_decay": decays(64)}
    if rule == "gated delta rule":
        strength = 1 / (1 + np.exp(-vectors(1)))
        return tokens | {"key": unit(vectors()), "log_decay": decays(1), "strength": strength}
    direction, rate = unit(vectors()), 1 / (1 + np.exp(-vectors()))
    return tokens | {
        "key": unit(vectors()), "log_decay": decays(64), "read": direction,
        "write": -rate * direction,
    }  # fmt: skip


def ours(rule: str, seq: int, form: str) -> Round:
    """Seconds of a gradient in JAX."""
    import jax
    import jax.numpy as jnp

    from gptlite.machine.runtime import set_up_jax
    from gptlite.nn.kernels.linear_recurrence import Tokens, linear_recurrence, token_by_token

    set_up_jax(cpu_devices=1)
    run = linear_recurrence if form == "chunks" else token_by_token
    arrays = {name: jnp.asarray(value) for name, value in drawn(rule, seq).items()}

    def loss(arrays: dict[str, Any]) -> Any:
        arrays = dict(arrays)
        strength = arrays.get("strength")
        if strength is not None:
            arrays["read"] = jnp.exp(arrays["log_decay"]) * arrays["key"]
            arrays["strength"], arrays["value"] = -strength, strength * arrays["value"]
        y, state = run(Tokens(**arrays), jnp.zeros((2, 64, 64)))
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(state))

    grad = jax.jit(jax.grad(loss))
    return lambda: timed(lambda: jax.block_until_ready(grad(arrays)), 1)


def naive(rule: str, seq: int) -> Round:
    """Seconds of a gradient of a loop in PyTorch."""
    import torch

    arrays = {
        name: torch.from_numpy(value).requires_grad_() for name, value in drawn(rule, seq).items()
    }

    def work() -> None:
        tokens = {name: array.unbind(1) for name, array in arrays.items()}
        state, outputs = torch.zeros(2, 64, 64), []
        for t in range(seq):
            key, value = tokens["key"][t], tokens["value"][t]
            before, state = state, tokens["log_decay"][t].exp()[..., None] * state
            if rule == "gated delta rule":
                found = (key[..., None] * state).sum(-2)
                value = tokens["strength"][t] * (value - found)
            elif rule == "two vectors":
                found = (tokens["read"][t][..., None] * before).sum(-2)
                state = state + tokens["write"][t][..., None] * found[..., None, :]
            state = state + key[..., None] * value[..., None, :]
            outputs.append((tokens["query"][t][..., None] * state).sum(-2))
        loss = torch.stack(outputs, 1).sin().sum() + state.sin().sum()
        for array in arrays.values():
            array.grad = None
        loss.backward()

    return lambda: timed(work, 1)


def compare(
    contenders: Sequence[Contender], rounds: int, unit: str, of: int = 1, form: str = ",.0f"
) -> None:
    """A table: `of` divided by the seconds, and how many times as long as the first one."""
    seconds = interleave(contenders, rounds)
    first = contenders[0].name
    print_table(
        ["", unit, f"times as long as {first}", "peak MiB"],
        [
            [
                contender.name,
                spread([of / s for s in seconds[contender.name]], form),
                speedup(seconds, contender.name, first, ".2f"),
                f"{contender.close():,.0f}",
            ]
            for contender in contenders
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "generate", "operator"])
    parser.add_argument("--mixers", nargs="+", default=MIXERS, help="an attention, or A+N:B")
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 2048])
    parser.add_argument("--read", nargs="+", type=int, default=[1000, 32_768, 1_000_000])
    parser.add_argument("--seq", type=int, default=2048, help="of the operator")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print_machine()
    if arguments.what == "train":
        for context in arguments.contexts:
            print(f"{TOKENS // context} x {context} tokens")
            contenders = [Contender(m, train, m, context, 10) for m in arguments.mixers]
            compare(contenders, arguments.rounds, "tokens/s", TOKENS)
    elif arguments.what == "generate":
        for read in arguments.read:
            print(f"after {read:,} tokens")
            contenders = [Contender(m, generate, m, read, 50) for m in arguments.mixers]
            compare(contenders, arguments.rounds, "tokens/s")
    else:
        for rule in RULES:
            print(f"{rule}, {arguments.seq:,} tokens")
            contenders = [
                Contender("chunks", ours, rule, arguments.seq, "chunks"),
                Contender("lax.scan", ours, rule, arguments.seq, "scan"),
                Contender("PyTorch", naive, rule, arguments.seq),
            ]
            compare(contenders, arguments.rounds, "gradients/s", form=".2f")


if __name__ == "__main__":
    main()
