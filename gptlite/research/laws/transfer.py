"""The law of shapes: whether learning rates carry over to a wider and to a deeper model."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gptlite.config import ModelConfig, OptimizerConfig
from gptlite.research.laws.law import NotApplicableError, NotAskedError
from gptlite.research.subject import Subject
from gptlite.training.loss import cross_entropy
from gptlite.training.optimizer import make_optimizer

# How many times as wide and as deep the other models are.
WIDER, DEEPER = 8, 4
# Steps of training. In the first one only the head moves, where the others' gradient is zero.
STEPS = 2
# The largest ratio of two changes. Those of the package's blocks are 0.72 to 1.2. That of a head
# whose rate does not fall with its width is 6.4, and of branches whose rate does not fall with
# depth 3.3.
LARGEST = 1.6


def check_transfer(s: Subject) -> str | None:
    """The first updates change a wider and a deeper model by as much, so rates carry over."""
    if s.kind != "model":
        raise NotApplicableError("it is of whole models")
    config = getattr(s.module, "config", None)
    if s.rebuilt(moved=False) is None or not isinstance(config, ModelConfig):
        raise NotAskedError("it needs a class, which is built from a config in other shapes")
    if config.init == "gpt2" or config.tied_head:
        raise NotApplicableError("with init gpt2 or a tied head, rates are those of one width")
    if config.block == "sandwich":
        raise NotApplicableError("each branch ends in a norm, and so adds as much at any depth")
    wider = {
        name: WIDER * size
        for name in ("d_model", "d_ff", "n_heads", "n_kv_heads")
        if (size := getattr(config, name)) is not None
    }
    usual = _changes(s, {})
    for what, shape in {
        f"{WIDER} times as wide": wider,
        f"{DEEPER} times as deep": {"n_layers": DEEPER * config.n_layers},
    }.items():
        for name, change in _changes(s, shape).items():
            ratio = change / usual[name]
            if not 1 / LARGEST < ratio < LARGEST:
                return (
                    f"in a model {what}, the first {STEPS} updates change {name} {ratio:.2g} times "
                    f"as much: by {change:.2g}, and {usual[name]:.2g} before. So its best learning "
                    "rate is another one. Is the standard deviation of a first matrix not "
                    "1 / sqrt(d_in), is a matrix that writes to the residual stream not called "
                    "output or down, or is a sum over channels not divided by their number?"
                )
    return None


def _changes(s: Subject, shape: dict[str, Any]) -> dict[str, float]:
    """By how much training changes logits and hidden states, in root mean square."""
    model = s.rebuilt(moved=False, **shape)
    trained = s.compiled(_trained)(s.call, model, s.x)
    has_hidden = hasattr(model, "hidden")
    functions = {"logits": s.call} | ({"hidden states": _hidden} if has_hidden else {})
    changes = {}
    for name, function in functions.items():
        before, after = (s.compiled(function)(m, s.x, None, None) for m in (model, trained))
        difference = np.asarray(after, np.float64) - np.asarray(before, np.float64)
        changes[name] = float(np.sqrt(np.mean(difference**2)))
    return changes


def _hidden(model: Any, ids: Any, lengths: Any, key: Any) -> Any:
    return model.hidden(ids)[0]


def _trained(call: Any, model: Any, ids: Any) -> Any:
    """`model` after the first steps, on one batch, at the peak of the learning rate."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = make_optimizer(OptimizerConfig(), params)

    def loss(params):
        logits = call(eqx.combine(params, static), ids[:, :-1], None, None)
        return jnp.mean(cross_entropy(logits, ids[:, 1:]))

    def step(_, carry):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return eqx.apply_updates(params, updates), state

    params, _ = jax.lax.fori_loop(0, STEPS, step, (params, optimizer.init(params)))
    return eqx.combine(params, static)
