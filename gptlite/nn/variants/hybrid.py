"""Stacks whose layers are of two kinds."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.errors import UserError
from gptlite.nn.context import Context
from gptlite.nn.stack import Layers, Remat, Stack, each_layer


class Kinds(eqx.Module):
    """The blocks of a `HybridStack`, each kind with a leading axis of its own layers."""

    base: Any
    nth: Any


class HybridStack(Stack):
    """A `Stack` in which every Nth layer has another attention. With layers counted from 1, and
    `4:full`, these are layers 4, 8, 12 and so on. (In Qwen3-Next, three layers of four have a
    state, and the fourth has keys and values of all tokens.)
    """

    every: int = eqx.field(static=True)

    def __init__(
        self,
        make_block: Callable[..., Any],
        n_layers: int,
        *,
        every: int,
        kinds: tuple[Any, Any],
        scan: bool = False,
        remat: Remat = "none",
        key: PRNGKeyArray,
    ):
        """`make_block(key, layer, config)` makes the layer of that number, from 0. `kinds` are the
        configs of the layers, and of every Nth."""
        keys, layers = jax.random.split(key, n_layers), jnp.arange(n_layers)
        is_nth = [(i + 1) % every == 0 for i in range(n_layers)]

        def make(config: Any, wanted: bool) -> Any:
            own = jnp.asarray([i for i in range(n_layers) if is_nth[i] == wanted])
            try:
                return eqx.filter_vmap(lambda key, layer: make_block(key, layer, config))(
                    keys[own], layers[own]
                )
            except UserError as error:  # which knows its attention as that of a config
                field = "model.attention_every" if wanted else "model.attention"
                raise UserError(re.sub(r"model\.attention\b", field, str(error))) from error

        self.blocks = Kinds(make(kinds[0], False), make(kinds[1], True))
        self.n_layers, self.every, self.scan, self.remat = n_layers, every, scan, remat

    @classmethod
    def of(cls, config: Any) -> Callable[..., "HybridStack"]:
        """The stack that `config.attention_every` describes, called as `Stack`, with a `make_block`
        that is also given the config of its layer."""
        number, _, name = config.attention_every.partition(":")
        base = dataclasses.replace(config, attention_every=None)
        kinds = base, dataclasses.replace(base, attention=name)
        return functools.partial(cls, every=int(number), kinds=kinds)

    def unstack(self) -> Layers:
        """See `Stack.unstack`."""
        nths = self.n_layers // self.every
        base = each_layer(self.blocks.base, self.n_layers - nths)
        nth = each_layer(self.blocks.nth, nths)
        layers = range(1, self.n_layers + 1)
        return Layers(tuple(next(base if i % self.every else nth) for i in layers))

    def _scan(
        self, blocks: Any, count: int, x: Array, context: Context, keys: Any
    ) -> tuple[Float[Array, "*batch seq d_model"], Float[Array, ""]]:
        """Groups of `every` layers, and then the layers after the last group."""
        groups, rest = divmod(count, self.every)
        scan, in_group = super()._scan, self.every - 1

        def grouped(tree: Any, size: int) -> Any:
            return jax.tree.map(
                lambda a: a[: groups * size].reshape(groups, size, *a.shape[1:]), tree
            )

        base, static = eqx.partition(blocks.base, eqx.is_array)
        nth, other_static = eqx.partition(blocks.nth, eqx.is_array)

        def group(x: Array, scanned: Any) -> tuple[Array, Array]:
            base, nth, keys = scanned
            first, last = (None, None) if keys is None else (keys[:-1], keys[-1:])
            x, loss = scan(eqx.combine(base, static), in_group, x, context, first)
            x, more = scan(eqx.combine(nth, other_static), 1, x, context, last)
            return x, loss + more

        scanned = grouped(base, in_group), grouped(nth, 1), grouped(keys, self.every)
        x, losses = lax.scan(group, x, scanned, length=groups)
        loss = jnp.sum(losses)
        if rest:
            after = eqx.combine(jax.tree.map(lambda a: a[groups * in_group :], base), static)
            keys = None if keys is None else keys[groups * self.every :]
            x, more = scan(after, rest, x, context, keys)
            loss += more
        return x, loss
