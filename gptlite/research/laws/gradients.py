"""The law of gradients: finite, not zero, and right by finite differences."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gptlite.machine.pytrees import inside, path_name
from gptlite.nn.stack import Stack
from gptlite.research.subject import RATE_FIELDS, Subject

# The name of the input among the parameters.
INPUT = "the input"
# Largest relative error of a derivative.
DERIVATIVE = 3e-3
# Sizes of steps. A kink or a choice (ReLU, top-k) may lie within one of them, and parts of a block
# may compute in float32, where small ones drown in rounding.
STEPS = (1e-2, 1e-3, 1e-4, 1e-5)
# By how much the output moves at a step, as a share of what it moves by at one ten times as large:
# 0.1, and a little more or less at a kink. Out of these bounds, it jumps somewhere.
SMOOTH = (0.03, 0.3)


@dataclass(frozen=True, eq=False)
class _Function:
    """What is derived."""

    where: str
    """For messages; empty for what the block computes of whole sequences."""
    module: Any
    call: Callable[[Any, Any], Any]
    """`call(module, x)`."""


def check_gradients(s: Subject) -> str | None:
    """Gradients, also of the input, are finite, not zero, and right by finite differences."""
    for function in _functions(s):
        message = _check(s, function)
        if message:
            return message
    return None


def _functions(s: Subject) -> Iterator[_Function]:
    yield _Function("", s.module, lambda module, x: s.call(module, x, None, None))
    if s.kind == "block":
        # A kernel for padding or for dropout has a backward pass, too.
        lengths = np.array([1, s.seq - 3, s.seq], np.int32)
        real = (np.arange(s.seq) < lengths[:, None])[..., None]
        dropping = s.rebuilt(**dict.fromkeys(RATE_FIELDS, 0.2))

        def call(module, x):
            y = s.call(module, x, jnp.asarray(lengths), jax.random.key(0))
            return jnp.where(real, y, 0)

        module = s.module if dropping is None else dropping
        yield _Function(", with padding and a key,", module, call)
    if s.aux_loss is not None:
        aux_loss = s.aux_loss
        yield _Function(" by the auxiliary loss", s.module, lambda m, x: aux_loss(m, x, None))


def _check(s: Subject, function: _Function) -> str | None:
    with jax.enable_x64(True):
        derivatives = None
        with contextlib.suppress(TypeError):
            derivatives = _Derivatives(s, function, jnp.float64)
        if derivatives is not None:
            return derivatives.check()
    # It fixes a dtype, such as that of a carry.
    return _Derivatives(s, function, jnp.float32).check()


class _Derivatives:
    """Derivatives along a random direction of each parameter, and of the input, at several inputs:
    where one has a kink, another one has none.

    **Raises:** `TypeError` if the block does not compute in the dtype.
    """

    def __init__(self, s: Subject, function: _Function, dtype: Any):
        self.subject, self.function = s, function
        params, self.static = eqx.partition(function.module, eqx.is_inexact_array)
        self.names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        self.stacked = jax.tree.leaves(inside(params, Stack))
        leaves, self.structure = jax.tree.flatten(params)
        # Layers below learn by the gradient of the input, if it is not ids.
        self.has_input = s.has_floats and INPUT not in s.zero_grad
        if self.has_input:
            self.names, self.stacked = [*self.names, INPUT], [*self.stacked, False]
        self.leaves = [np.asarray(leaf, dtype) for leaf in leaves]
        points = np.stack([s.x, s.other, s.x[:, ::-1]])
        self.points = points.astype(dtype) if s.has_floats else points
        random = np.random.default_rng(0)
        shapes = [leaf.shape for leaf in leaves] + [s.x.shape] * self.has_input
        self.directions = [random.normal(size=shape).astype(dtype) for shape in shapes]
        out = jax.eval_shape(lambda point: self._call(self._leaves(point), point), self.points[0])
        self.weights = np.asarray(random.normal(size=out.shape), dtype)

    def _call(self, leaves: Any, point: Any) -> Any:
        params = leaves[:-1] if self.has_input else leaves
        inputs = leaves[-1] if self.has_input else point
        module = eqx.combine(jax.tree.unflatten(self.structure, params), self.static)
        return self.function.call(module, inputs)

    def _leaves(self, point: Any) -> list[Any]:
        leaves = [jnp.asarray(leaf) for leaf in self.leaves]
        return [*leaves, point] if self.has_input else leaves

    def _at(self, point: Any) -> Any:
        """The gradient, and its products with the directions: as it is, and by differences."""
        leaves = self._leaves(point)

        def loss(leaves):
            return jnp.sum(self.weights * jnp.sin(self._call(leaves, point)))

        def moved(steps):
            pairs = zip(leaves, steps, self.directions, strict=True)
            return self._call([leaf + step * direction for leaf, step, direction in pairs], point)

        grads = jax.grad(loss)(leaves)
        dots = [jnp.vdot(g, d) for g, d in zip(grads, self.directions, strict=True)]
        eye = jnp.eye(len(leaves), dtype=self.weights.dtype)
        steps = jnp.concatenate([sign * h * eye for h in STEPS for sign in (1, -1)])
        ends = jax.lax.map(moved, steps)
        ends = ends.reshape(len(STEPS), 2, len(leaves), -1).astype(self.weights.dtype)
        losses = jnp.sin(ends) @ self.weights.ravel()
        widths = 2 * jnp.array(STEPS, self.weights.dtype)[:, None]
        movement = jnp.abs(ends[:, 0] - ends[:, 1]).max(-1)
        return grads, jnp.stack(dots), (losses[:, 0] - losses[:, 1]) / widths, movement

    def check(self) -> str | None:
        if not self.names:
            return None
        results = self.subject.compiled(lambda points: jax.lax.map(self._at, points))(self.points)
        results = jax.tree.map(lambda a: np.asarray(a, np.float64), results)
        grads, analytic, numeric, movement = results
        message = None if self.function.where else self._check_values(grads)
        if message:
            return message
        # [points, parameters], and [points, steps, parameters].
        errors = np.abs(numeric - analytic[:, None]).min(axis=1)
        size = np.maximum(np.abs(analytic), np.abs(numeric).min(axis=1))
        # Of derivatives that are small beside the largest one, rounding is left.
        noise = 1e-6 if self.weights.dtype == np.float64 else 1e-2
        if not size.any():
            return None  # an auxiliary loss that is always 0
        errors = errors / np.maximum(size, noise * size.max())
        jumps = self._jumps(movement)
        for i, name in enumerate(self.names):
            # Two of three: at one, there may be a kink within all steps.
            wrong = errors[:, i] > DERIVATIVE
            if name in self.subject.zero_grad or np.sum(wrong) < 2 or not size[:, i].any():
                continue
            if np.sum(wrong & ~jumps[:, i]) < 2:
                self.subject.notes[f"gradients of {name}"] = (
                    "the output jumps (rounding, a choice), and differences cannot tell what its "
                    "gradient should be; a reference can, another form of the block"
                )
                continue
            point = int(np.argsort(np.where(jumps[:, i], 0, errors[:, i]))[1])
            ratio = analytic[point, i] / numeric[point, 1, i] if numeric[point, 1, i] else np.inf
            what = f"{name}{self.function.where}"
            return (
                f"the gradient of {what} is wrong: its directional derivative is "
                f"{analytic[point, i]:.4g}, and finite differences give "
                f"{numeric[point, 1, i]:.4g}, so it is {ratio:.4g} times what it should be (at "
                "another direction, perhaps otherwise): look at a custom_vjp or a stop_gradient. "
                f"(If that is by design: zero_grad=[{name!r}].)"
            )
        return None

    def _check_values(self, grads: Any) -> str | None:
        for name, grad, layers in zip(self.names, grads, self.stacked, strict=True):
            for layer, part in enumerate(np.moveaxis(grad, 1, 0) if layers else [grad]):
                of = name + (f" of layer {layer}" if layers else "")
                if not np.isfinite(part).all():
                    return f"the gradient of {of} is not finite."
                if name not in self.subject.zero_grad and not np.abs(part).max() > 1e-12:
                    return (
                        f"the gradient of {of} is zero. (If that is by design: "
                        f"zero_grad=[{name!r}].)"
                    )
        return None

    def _jumps(self, movement: np.ndarray) -> np.ndarray:
        """Whether the output jumps within the steps, for `[points, parameters]`, given by how much
        it moves at them, `[points, steps, parameters]`."""
        in_float64 = self.weights.dtype == np.float64  # else rounding moves it at small steps
        movement = movement[:, 1:] if in_float64 else movement[:, :2]
        larger, smaller = movement[:, :-1], movement[:, 1:]
        is_smooth = (SMOOTH[0] * larger <= smaller) & (smaller <= SMOOTH[1] * larger)
        return np.logical_or(~is_smooth.all(axis=1), ~movement.any(axis=1))
