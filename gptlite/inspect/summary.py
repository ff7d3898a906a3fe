"""A table of a model's parts, with output and parameters, and the model's FLOPs and memory."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from gptlite.family.seq2seq import Seq2Seq
from gptlite.inspect.flops import flops_per_token, inputs_of
from gptlite.inspect.hooks import with_call_hook
from gptlite.machine.fields import Count, check_value
from gptlite.machine.pytrees import Trainable, count_parameters, is_array, is_stacked, path_name
from gptlite.models.gpt import GPT
from gptlite.training.loss import cross_entropy, window_losses


def activation_bytes(model: Any, batch_size: int) -> int:
    """Bytes that the forward pass of a batch at the full context, with the losses and dropout,
    keeps for the backward pass. The compiler may keep less, and recompute the rest. Of a model that
    is no `GPT` and no `Seq2Seq`, without the losses and dropout."""
    params, static = eqx.partition(model, is_array)

    def activations(rows: int) -> int:
        residuals = jax.eval_shape(
            lambda p, *ids: jax.vjp(lambda p: _losses(eqx.combine(p, static), *ids), p)[1],
            params,
            *inputs_of(model, rows),
        )
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals))

    # Two rows keep twice the activations of one, and the same parameters.
    return batch_size * (activations(2) - activations(1))


def _losses(model: Any, *ids: Array) -> Array:
    """What is trained, as far as it is known of the model."""
    key = jax.random.key(0)
    if isinstance(model, GPT):
        return window_losses(model, jnp.pad(ids[0], [(0, 0), (0, 1)]), key=key)[0]
    if isinstance(model, Seq2Seq):
        return cross_entropy(model(*ids, key=key), ids[1])
    return model(*ids)


def summary(model: Any, *, batch_size: int = 1, trained: Trainable = is_array) -> str:
    """The table, with totals below it, of a `model`: a `GPT`, an `Encoder`, a `Seq2Seq`, or any
    other from ids that has a `config`.

    One line for each module that holds parameters. Memory is an estimate for training in float32 on
    one device, which has all parameters and computes `batch_size` rows at once: parameters,
    gradients, Adam's two moments, activations. `trained`: the parameters that have a gradient.
    Default: all.

    **Raises:** `UserError` if `batch_size` is out of range.
    """
    check_value("batch_size", batch_size, Count)
    total, count_trained = count_parameters(model), count_parameters(eqx.filter(model, trained))
    rows = [("module", "output", "parameters", "share")]
    for name, layers, module, shape in _modules(model):
        count = count_parameters(module)
        label = f"{name} (x {layers})" if layers > 1 else name
        rows.append((label, shape, f"{count:,}", f"{count / total:.1%}"))
    decoder = model.decoder if isinstance(model, Seq2Seq) else model
    if isinstance(decoder, GPT) and decoder.head is None:
        rows.append(("head (the embedding's weight)", f"[seq, {decoder.vocab_size}]", "0", "0.0%"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}"
        for a, b, c, d in rows
    ]
    forward, training = flops_per_token(model, trained)
    of_what = " (of the target, for a source as long)" if isinstance(model, Seq2Seq) else ""
    state = 4 * (total + 3 * count_trained)
    activations = activation_bytes(model, batch_size)
    some = "" if count_trained == total else f", of which {count_trained:,} are trained"
    return "\n".join(
        [
            *lines[:1],
            "-" * len(lines[0]),
            *lines[1:],
            "-" * len(lines[0]),
            f"parameters                {total:,}{some}",
            f"FLOPs per token, forward  {forward:,}{of_what}",
            f"FLOPs per token, training {training:,}{of_what}",
            f"memory of one device      {(state + activations) / 2**20:,.0f} MiB in training with "
            f"{batch_size} rows at once: {state / 2**20:,.0f} for parameters, gradients and Adam, "
            f"about {activations / 2**20:,.0f} for activations",
        ]
    )


def _modules(model: Any) -> list[tuple[str, int, Any, str]]:
    """Name, number of layers, module and output shape of each module that holds arrays itself."""
    shapes: dict[str, str] = {}

    def on_call(name, module, arguments, options, out):
        # A block also returns its cache.
        shapes[name] = _shape(out[0] if isinstance(out, tuple) else out)

    out = eqx.filter_eval_shape(with_call_hook(model, _holds_arrays, on_call), *inputs_of(model, 1))
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=_holds_arrays)
    modules = [(path_name(path), node) for path, node in nodes if _holds_arrays(node)]
    # A head is never called: only its weight is used.
    shapes |= {name: _shape(out) for name, _ in modules if name.endswith("head")}
    return [
        (name, _layers(node) if is_stacked(name) else 1, node, shapes.get(name, "-"))
        for name, node in modules
    ]


def _layers(module: Any) -> int:
    """Of a module in a `Stack`: the leading axis of its arrays."""
    return next(a for a in jax.tree.leaves(module) if is_array(a)).shape[0]


def _shape(x: Any) -> str:
    return f"[seq, {x.shape[-1]}]"


def _holds_arrays(node: Any) -> bool:
    return isinstance(node, eqx.Module) and any(map(is_array, vars(node).values()))
