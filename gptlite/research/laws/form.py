"""Laws of the form: what a block keeps, returns, and leaves behind."""

import dataclasses
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gptlite.machine.pytrees import cast, is_parameter, path_name
from gptlite.research.laws.law import NotApplicableError, compare, is_finite, pairs
from gptlite.research.subject import Subject, modules_in

# A seed that nothing else has.
REBUILT = 2**30


def check_parameters(s: Subject) -> str | None:
    """No array is in a static field or complex; parameters are in float32."""
    for module in modules_in(s.module):
        for field in dataclasses.fields(module):
            if not field.metadata.get("static", False):
                continue
            leaves = jax.tree.leaves(getattr(module, field.name, None))
            if any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
                return (
                    f"{type(module).__name__}.{field.name} is an array in a static field, which is "
                    "neither trained nor saved."
                )
    if not isinstance(s.module, eqx.Module):
        name = type(s.module).__name__
        return f"{name} is no equinox.Module, so that its arrays are neither trained nor saved."
    for path, leaf in jax.tree_util.tree_leaves_with_path(s.module):
        if is_parameter(leaf) and leaf.dtype != jnp.float32:
            return f"{path_name(path)} is in {leaf.dtype} instead of float32."
    return None


def check_shapes(s: Subject) -> str | None:
    """The output has the shape and the dtype of the input (of a model: logits)."""
    gives_logits = s.kind in ("model", "encoder-decoder")
    # The shortest first: what is remembered of it shows in the longer ones.
    for x in (s.x[:, :1], s.x, s.x[0]):
        for dtype in (jnp.float32, jnp.bfloat16):
            inputs = jax.ShapeDtypeStruct(x.shape, dtype if s.has_floats else x.dtype)
            out = eqx.filter_eval_shape(s.call, shapes_in(s.module, dtype), inputs, None, None)
            name = type(s.module).__name__
            if not isinstance(out, jax.ShapeDtypeStruct):
                kind = f"a {type(out).__name__}" if out is not None else "None"
                return (
                    f"{name} must return an array like its input, and returned {kind}. (An "
                    "attention, or a whole block, has a method init_cache, and returns a tuple.)"
                )
            shape = (*(x.shape[:-1] if s.has_floats else x.shape), s.width)
            wanted = jnp.dtype(jnp.float32 if gives_logits else dtype)
            if out.shape != shape or out.dtype != wanted:
                return (
                    f"{inputs.dtype}{list(inputs.shape)} in, {out.dtype}{list(out.shape)} out "
                    f"instead of {wanted}{list(shape)}."
                )
    if s.kind == "block" and s.causal:
        init_cache: Any = s.init_cache
        eqx.filter_eval_shape(lambda module: init_cache(module, s.x, s.seq), s.module)
    return None


def check_jit(s: Subject) -> str | None:
    """Compiling twice gives the same output, also beside the gradient."""
    again, _, _ = s.pull(s.x, np.zeros((*s.x.shape[:2], s.width), np.float32))
    return compare(again, s.run(s.x), "a second compilation, beside the gradient,", "the first")


def check_memory(s: Subject) -> str | None:
    """A call remembers nothing of the calls before."""

    def trace(x):
        params, static = eqx.partition(s.module, eqx.is_array)

        def calls(params, x):  # as in evaluation, and as in training
            module = eqx.combine(params, static)
            return [s.call(module, x, None, key) for key in (None, jax.random.key(0))]

        program = jax.make_jaxpr(calls)(params, x)
        # Functions inside are named by their addresses.
        return re.sub(r" at 0x[0-9a-f]+", "", str(program)), program.consts

    short, long = s.x[:, :4], s.x
    before = {len(x[0]): trace(x) for x in (short, long)}
    for x in (short, long):
        text, constants = trace(x)
        old_text, old_constants = before[len(x[0])]
        if text != old_text or not _are_equal(constants, old_constants):
            return (
                f"a second call with {len(x[0])} tokens computes something else than the first: "
                "something is remembered between calls."
            )
    # Without a compiler, numbers can be remembered, too.
    parts = (jnp.asarray(x) for x in (short, s.other[:, :4], short))
    first, _, again = (s.call(s.module, x, None, None) for x in parts)
    return compare(again, first, "a second call, not compiled,", "the first")


def check_build(s: Subject) -> str | None:
    """Built anew, it computes the same with the same arrays; its own first values are finite."""
    again = s.rebuilt(seed=REBUILT)
    if again is None:
        raise NotApplicableError("it is built already")
    others, rest = eqx.partition(again, eqx.is_array)
    leaves = jax.tree.leaves(eqx.filter(s.module, eqx.is_array))
    if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in jax.tree.leaves(others)]:
        return "built from another key, it has arrays of other shapes."
    again = eqx.combine(jax.tree.unflatten(jax.tree.structure(others), leaves), rest)
    message = compare(s.run(s.x, module=again), s.run(s.x), "built from another key, it", "before")
    if message:
        return (
            f"{message} Its arrays are the same: something else depends on the key, such as an "
            "array that a function holds, or on what was built before. It is neither trained nor "
            "saved."
        )
    here, above = (s.rebuilt(layer=layer, moved=False) for layer in (0, 1))
    y, params, inputs = s.pull(s.x, np.ones((*s.x.shape[:2], s.width), np.float32), module=here)
    for what, values in {"output": y, "gradient": (params, inputs)}.items():
        if not is_finite(values):
            return f"with its own first values, the {what} is not finite (in layer 0)."
    for name, one, other in pairs(*(eqx.filter(x, eqx.is_inexact_array) for x in (here, above))):
        if one.ndim <= 1 and not np.array_equal(one, other):
            s.notes[f"build of {name}"] = (
                "its first value depends on the layer, and training changes it; a number that "
                "should stay is computed in the call, from the integer"
            )
    return None


def _are_equal(these: list[Any], those: list[Any]) -> bool:
    pairs = list(zip(these, those, strict=False))
    return len(these) == len(those) and all(np.array_equal(a, b) for a, b in pairs)


def shapes_in(module: Any, dtype: Any) -> Any:
    """The shapes of `module`, its parameters in `dtype`."""
    return eqx.filter_eval_shape(cast, module, dtype)
