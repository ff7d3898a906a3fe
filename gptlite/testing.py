"""Is a block right? `check_block(block)` tells which law it breaks, where, and by how much.

    shapes      what comes out has the shape and dtype of what went in (a model: logits)
    parameters  all of them are where training finds them
    jit         compiled or not, once or twice: the same
    causal      no output depends on a later input
    both ways   of an encoder instead: every output depends on every input; of an encoder-decoder
                as well: on every token of the source
    batch       a sequence gets the same alone, in a batch, and under vmap
    cached      read in any portions, or one token at a time, the same as at once
    padding     places without a token change nothing, before or after (where there is a mask)
    gradients   finite, not zero for any parameter, and right by finite differences in float64
    bfloat16    near float32
    scan        a stack of it is the same unrolled and scanned (where it has a cache)

From the command line: `python -m gptlite.testing FILE.py:CLASS`.

A block is one of these, told apart by its call: a layer, `layer(x) -> y`, as an MLP or a norm; a
block with a cache, `block(x, cache, offset, *, key) -> (y, cache)`, as attention or a whole layer
of the stack; a model, `model(ids) -> logits`, as `GPT`; an `Encoder`, whose last axis is d_model;
a `Seq2Seq`, which is checked as the model of its targets, with and without padding in its sources.
"""

import argparse
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from gptlite.cli import errors_as_sentences
from gptlite.config import ModelConfig, is_own, require
from gptlite.laws import LAWS, SMALL, Broken, describe, recognise
from gptlite.models.summary import count_parameters
from gptlite.nn.embedding import Embedding
from gptlite.own import load_class
from gptlite.sharding import path_name


class CheckError(AssertionError):
    """A block breaks a law. `laws` are the names of those broken."""

    def __init__(self, name: str, broken: Sequence[tuple[str, str]]):
        self.laws = tuple(law for law, _ in broken)
        lines = [f"{law}: {what}" for law, what in broken]
        super().__init__(f"{name} is not right.\n  " + "\n  ".join(lines))


@dataclass(frozen=True)
class Report:
    """What was checked of a block that breaks no law."""

    name: str
    kind: str
    width: int
    """The last axis of what comes out: d_model; of logits the vocabulary."""
    parameters: int
    laws: tuple[str, ...]

    def __str__(self) -> str:
        of_ids = self.kind in ("model", "encoder-decoder")
        width = f"{'vocabulary' if of_ids else 'd_model'} {self.width}"
        other = ("causal", "both ways")  # one or the other, which goes without saying
        return (
            f"{self.name} ({self.kind}, {width}, {self.parameters:,} parameters) is right: "
            f"{', '.join(self.laws)}"
            + "".join(f"; {law} does not apply" for law in LAWS if law not in self.laws + other)
        )


def check_block(
    block: Any,
    *,
    config: ModelConfig = SMALL,
    d_model: int | None = None,
    causal: bool | None = None,
    seq: int = 8,
    idle: Sequence[str] = (),
    seed: int = 0,
) -> Report:
    """Check a block against the laws in `gptlite.testing`'s docstring. A model takes some seconds,
    an encoder-decoder half a minute.

    Parameters are moved at random first, so that one that starts at zero hides nothing. It is
    called as training and generation call it; but where gradients are looked at,
    `eqx.nn.inference_mode` is on, for a mixture's balance loss is in them and not in the output.

    **Arguments:**

    - `block`: a module, or a class that is built as `block(config, key=key)`, and is given `causal`
      if it takes that.
    - `config`: for a class.
    - `d_model`: for a module; by default found out.
    - `causal`: False for an encoder's, which is to see both ways; by default, False for an
      `Encoder` and for what has a `Bidirectional` mask.
    - `seq`: places in a sequence; more than any window or chunk that the block has.
    - `idle`: names of parameters that are known to have no gradient: constants, and the bias of
      attention's keys without rotary positions and QK-norm, which softmax does not feel.
    - `seed`: of the parameters and inputs.

    **Raises:** `CheckError`, which names all laws that are broken.
    """
    key = jax.random.key(seed)
    name = block.__name__ if isinstance(block, type) else type(block).__name__
    if isinstance(block, type):
        try:
            told = "causal" in inspect.signature(block).parameters and causal is not None
            block = block(config, **({"causal": causal} if told else {}), key=key)
        except Exception as error:
            raise CheckError(
                name, [("shapes", f"it cannot be built: {describe(error)}")]
            ) from error
        d_model = config.d_model
    if any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(eqx.filter(block, eqx.is_array))):
        raise CheckError(name, [("parameters", "complex ones are cast to real ones in training.")])
    block = _move_parameters(_thawed(block), key, idle)
    try:
        subject = recognise(block, d_model, causal, seq, idle, seed)
    except Broken as found:
        raise CheckError(name, [("shapes", str(found))]) from found
    left_out = set(subject.does_not_apply())
    applies = tuple(law for law in LAWS if law not in left_out)
    broken = []
    for law in applies:
        try:
            # GPUs multiply float32 numbers as shorter ones, by default.
            with jax.default_matmul_precision("highest"):
                getattr(subject, f"check_{law.replace(' ', '_')}")()
        except Broken as found:
            broken.append((law, str(found)))
        except Exception as error:
            broken.append((law, f"it raised {describe(error)}"))
        if law == "shapes" and broken:
            break  # the rest would only say so again
    if broken:
        raise CheckError(name, broken)
    width = subject.expected(subject.x)[0][-1]
    return Report(name, subject.kind, width, count_parameters(block), applies)


def _thawed(block: Any) -> Any:
    """`block` with no embedding frozen: its laws are those of a trained one."""

    def is_frozen(node):
        return isinstance(node, Embedding) and node.frozen

    def free(node):
        if not is_frozen(node):
            return node
        rows, d = node.weight.shape
        return Embedding(rows, d, vectors=node.weight, scale=node.scale, key=jax.random.key(0))

    return jax.tree.map(free, block, is_leaf=is_frozen)


def _move_parameters(block: Any, key: Any, idle: Sequence[str]) -> Any:
    """Every parameter a little aside, and far from zero where it was zero."""
    named, structure = jax.tree_util.tree_flatten_with_path(block)
    leaves = [leaf for _, leaf in named]
    for place, (path, leaf) in enumerate(named):
        if not eqx.is_inexact_array(leaf) or path_name(path) in idle:
            continue
        noise = jax.random.normal(jax.random.fold_in(key, place), leaf.shape, leaf.dtype)
        size = float(jnp.sqrt(jnp.mean(jnp.square(leaf)))) if leaf.size else 0.0
        scale = 0.1 * size or (leaf.shape[-1] ** -0.5 if leaf.ndim > 1 else 0.1)
        leaves[place] = leaf + scale * noise
    return jax.tree.unflatten(structure, leaves)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m gptlite.testing",
        description="Check a block of your own, built as CLASS(config, key=key).",
    )
    parser.add_argument("block", metavar="FILE.py:CLASS")
    parser.add_argument(
        "--idle",
        metavar="NAME",
        action="append",
        default=[],
        help="a parameter known to do nothing",
    )
    parser.add_argument(
        "--both-ways",
        action="store_true",
        help="it is an encoder's: every output is to depend on every input",
    )
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    arguments = parser.parse_args()
    name = arguments.block
    with errors_as_sentences(arguments.debug):
        require(is_own(name), f"A block is named as FILE.py:CLASS, got {name!r}.")
        try:
            causal = False if arguments.both_ways else None
            print(check_block(load_class(name), causal=causal, idle=arguments.idle))
        except CheckError as error:
            print(error)
            sys.exit(1)


if __name__ == "__main__":
    main()
