"""A model as a table: what each part outputs, how many parameters it has, and what it costs."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import PyTree

from gptlite.models.gpt import GPT


def count_parameters(model: PyTree) -> int:
    """Numbers in all of `model`'s arrays, layers counted one by one, a shared matrix once."""
    return sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, _is_array)))


def flops_per_token(model: GPT) -> tuple[int, int]:
    """Floating-point operations a token, forward and for training (forward and backward), at the
    full context: those of the matrix products, two for each multiply-add, as the program does
    them (attention computes its whole square, masked half included)."""
    context = model.config.context_length
    ids = jax.ShapeDtypeStruct((context,), jnp.int32)

    def loss(model, ids):
        return jnp.mean(model(ids))

    forward = eqx.filter_make_jaxpr(lambda model, ids: model(ids))(model, ids)[0]
    training = eqx.filter_make_jaxpr(eqx.filter_grad(loss))(model, ids)[0]
    return _product_flops(forward.jaxpr) // context, _product_flops(training.jaxpr) // context


def activation_bytes(model: GPT, batch_size: int) -> int:
    """What the forward pass of a batch at the full context keeps for the backward pass, before
    the compiler finds what can do without."""
    ids = jax.ShapeDtypeStruct((batch_size, model.config.context_length), jnp.int32)
    params, static = eqx.partition(model, _is_array)
    residuals = jax.eval_shape(
        lambda params, ids: jax.vjp(lambda p: eqx.combine(p, static)(ids), params)[1], params, ids
    )
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals))
    return max(0, kept - 4 * count_parameters(model))


def summary(model: GPT, *, batch_size: int = 1) -> str:
    """The table, with totals below it.

    One line for each module that holds parameters. Memory is an estimate for training in float32
    on batches of `batch_size`: parameters, gradients, Adam's two moments, activations.
    """
    total = count_parameters(model)
    rows = [("module", "output", "parameters", "share")]
    for name, layers, module, shape in _modules(model):
        count = count_parameters(module)
        label = f"{name} (x {layers})" if layers > 1 else name
        rows.append((label, shape, f"{count:,}", f"{count / total:.1%}"))
    if model.head is None:
        rows.append(("head (the embedding's weight)", f"[seq, {model.vocab_size}]", "0", "0.0%"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}"
        for a, b, c, d in rows
    ]
    forward, training = flops_per_token(model)
    state, activations = 4 * 4 * total, activation_bytes(model, batch_size)
    return "\n".join(
        [
            *lines[:1],
            "-" * len(lines[0]),
            *lines[1:],
            "-" * len(lines[0]),
            f"parameters                {total:,}",
            f"FLOPs a token, forward    {forward:,}",
            f"FLOPs a token, training   {training:,}",
            f"memory for training       {(state + activations) / 2**20:,.0f} MiB at batch size "
            f"{batch_size}: {state / 2**20:,.0f} for parameters, gradients and Adam, at most "
            f"{activations / 2**20:,.0f} for activations",
        ]
    )


def _modules(model: GPT) -> list[tuple[str, int, Any, str]]:
    """Name, number of layers, module and output shape of each module that holds arrays itself."""
    found: list[tuple[str, Any]] = []
    shapes: dict[str, str] = {}

    def watch(path, node):
        if not _holds_arrays(node):
            return node
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found.append((name, node))
        return _Watched(node, functools.partial(shapes.__setitem__, name))

    watched = jax.tree_util.tree_map_with_path(watch, model, is_leaf=_holds_arrays)
    ids = jax.ShapeDtypeStruct((1, model.config.context_length), jnp.int32)

    def read(watched, ids):
        # With a cache, because there query, key and value are layers of their own.
        hidden, _ = watched.extend(ids, model.init_cache((1,)))
        return watched.logits(hidden)

    shapes["head"] = _shape(eqx.filter_eval_shape(read, watched, ids))
    layers = model.config.n_layers
    return [
        (name, layers if name.startswith("stack.") else 1, node, shapes.get(name, "-"))
        for name, node in found
    ]


class _Watched(eqx.Module):
    """Stands in for a module and notes the shape of what comes out of it."""

    inner: Any
    note: Callable[[str], None] = eqx.field(static=True)

    def __call__(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        # (Of a block, the output comes with its cache.)
        self.note(_shape(out[0] if isinstance(out, tuple) else out))
        return out

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.inner, attribute)


def _shape(x: Any) -> str:
    return f"[seq, {x.shape[-1]}]"


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def _holds_arrays(node: Any) -> bool:
    return isinstance(node, eqx.Module) and any(map(_is_array, vars(node).values()))


def _product_flops(jaxpr: Jaxpr) -> int:
    """Two for each multiply-add of the matrix products in `jaxpr` and all that it calls."""
    total = 0
    for equation in jaxpr.eqns:
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += repeats * sum(_product_flops(inner) for inner in _inner_jaxprs(equation.params))
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left: Any = equation.invars[0].aval
            product: Any = equation.outvars[0].aval
            depth = math.prod(left.shape[axis] for axis in contracted)
            total += 2 * depth * math.prod(product.shape)
    return total


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item
