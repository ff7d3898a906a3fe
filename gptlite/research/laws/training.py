"""Laws of training alone: dropout, and auxiliary losses."""

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from gptlite.research.laws.law import SAME, NotApplicableError, is_finite, size_of
from gptlite.research.laws.numbers import odd_inputs
from gptlite.research.subject import RATE_FIELDS, Subject, modules_in

# Shares that are dropped, and how often.
RATES = (0.1, 0.4)
DRAWS = 512
# A share that is so small that nothing at all is dropped in many draws.
RARE = 2e-4
# Tokens that are looked at.
TOKENS = 6
# The difference between the mean over keys and the output without a key, as a share of the usual
# difference of one output. A right block that is not linear has up to 0.38 at the first rate and
# 0.59 at the second. Without rescaling it is 0.32 at the first rate. If something is dropped
# without a key, too, it is 0.7.
BIASED, SUSPICIOUS, BIASED_MODULE = 0.5, 0.2, 0.65
# The variance at the second rate over that at the first: 6, and 3.2 to 7.5 for right blocks that
# are not linear. If the shares that are kept and dropped are exchanged, it is 1/6.
SPREAD = (2, 12)
# The same for linear blocks, whose mean is kept up to the noise of the draws: 6 to 7.6. With half
# the share it is 4.75.
LINEAR, LINEAR_SPREAD = 0.05, 5.4


def check_dropout(s: Subject) -> str | None:
    """Dropout needs a key, keeps the mean, drops the right share, and differs by use and row."""
    if s.kind == "layer":
        raise NotApplicableError("it is called without a key")
    by_rate = {rate: s.rebuilt(**dict.fromkeys(RATE_FIELDS, rate)) for rate in RATES}
    if by_rate[RATES[0]] is None:
        by_rate = {}
    x = one_row(s)
    spread, biases = [], []
    for rate, module in (by_rate or {None: s.module}).items():
        still, drawn = draw(s, module, x)
        message = _check_draws(module, still, drawn, rate) or _check_keys(s, module, x)
        if message:
            return message
        noise = drawn - still
        spread.append(np.sqrt(np.mean(noise**2)))
        biases.append(np.sqrt(np.mean(noise.mean(axis=(0, 1)) ** 2)) / spread[-1])
    is_biased = biases[0] > (BIASED if by_rate else BIASED_MODULE)
    if is_biased or (biases[0] > SUSPICIOUS and by_rate and _is_not_rescaled(s, x)):
        return (
            f"the mean over keys is not the output without one: they differ by {biases[0]:.2g} of "
            "what single outputs differ by. Is what is kept divided by the share that is kept, and "
            "nothing dropped without a key?"
        )
    least = LINEAR_SPREAD if max(biases) < LINEAR else SPREAD[0]
    if by_rate and not least < (spread[1] / spread[0]) ** 2 < SPREAD[1]:
        return (
            f"the wrong share is dropped: from {RATES[0]:g} to {RATES[1]:g}, the variance grows by "
            f"a factor of {(spread[1] / spread[0]) ** 2:.3g}, and should by 6."
        )
    return _check_each(s, x) if by_rate else None


def _check_each(s: Subject, x: np.ndarray) -> str | None:
    """Where a block has two places of dropout, each by itself: one may hide the other."""
    none = dict.fromkeys(RATE_FIELDS, 0.0)
    still = jax.tree.structure(s.rebuilt(**none))
    modules = {field: s.rebuilt(**none | {field: RATES[1]}) for field in RATE_FIELDS}
    if any(jax.tree.structure(module) == still for module in modules.values()):
        return None
    for field, module in modules.items():
        message = _check_draws(module, *draw(s, module, x), RATES[1])
        if message:
            return f"with {field} alone, {message}"
    return None


def _is_not_rescaled(s: Subject, x: np.ndarray) -> bool:
    """Whether nothing changes where nothing is dropped, though the block is not blind to scale, as
    it is where a norm follows."""
    still, drawn = draw(s, s.rebuilt(**dict.fromkeys(RATE_FIELDS, RARE)), x)
    same = np.abs(drawn - still).max(axis=(1, 2, 3)) <= 1e-6 * size_of(still)
    if np.mean(same) < 0.05:
        return False
    _, often = draw(s, s.rebuilt(**dict.fromkeys(RATE_FIELDS, RATES[1])), x)
    if size_of(often[:, :, 0] - still[:, 0]) <= 1e-5 * size_of(still):
        s.notes["dropout's mean"] = (
            "the first token's output never changes, as where scores are dropped, and not weights: "
            "softmax scales the others. A reference tells whether that is meant"
        )
        return False
    # The first token, so that queries and keys have no effect: softmax of one score is 1.
    random, first = np.random.default_rng(0), s.run(x[:1, :1])
    leaves, structure = jax.tree.flatten(s.module)
    for i, leaf in enumerate(leaves):
        if not eqx.is_inexact_array(leaf) or leaf.ndim < 2:
            continue
        effects = []
        for changed in (1.5 * leaf, leaf * random.normal(size=leaf.shape).astype(leaf.dtype)):
            other = jax.tree.unflatten(structure, [*leaves[:i], changed, *leaves[i + 1 :]])
            effects.append(size_of(s.run(x[:1, :1], module=other) - first) / size_of(first))
        if effects[0] < SAME and effects[1] > 0.01:
            return False
    return True


def _check_keys(s: Subject, module: Any, x: np.ndarray) -> str | None:
    """Whether numbers are drawn with one key twice. JAX's own check knows no values: two keys that
    are folded from one key and one number are the same."""
    used: list[bytes] = []
    impl = _recording(lambda key: used.append(np.asarray(key).tobytes()))
    with contextlib.suppress(NotImplementedError):  # a few distributions are for Threefry alone
        jax.block_until_ready(s.compiled(s.call)(module, x, None, jax.random.key(0, impl=impl)))
    jax.effects_barrier()
    if len(used) == len(set(used)):
        return None
    return "one key is used more than once, so that what is dropped is alike: split it."


def _recording(record: Callable[[Any], None]) -> Hashable:
    """Random numbers as usual, whose keys are recorded when they are drawn from."""

    def wrapped(data):
        return jax.random.wrap_key_data(data, impl="threefry2x32")

    def draw_bits(data, width, shape):
        jax.debug.callback(record, data)
        return jax.random.bits(wrapped(data), shape, f"uint{width}")

    return define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jax.random.key_data(jax.random.key(seed, impl="threefry2x32")),
        split=lambda data, shape: jax.random.key_data(jax.random.split(wrapped(data), shape)),
        random_bits=draw_bits,
        fold_in=lambda data, number: jax.random.key_data(jax.random.fold_in(wrapped(data), number)),
        name="recording",
        tag="rec",
    )


def one_row(s: Subject) -> np.ndarray:
    """The beginning of the first row, three times."""
    return np.broadcast_to(s.x[:1, :TOKENS], (3, TOKENS, *s.x.shape[2:])).copy()


def draw(s: Subject, module: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The output without a key, and outputs for many, `[draws, row, seq, width]`."""
    keys = jax.random.split(jax.random.key(1), DRAWS)
    still, drawn = s.compiled(_draws)(s.call, module, x, keys)
    return np.asarray(still, np.float64), np.asarray(drawn, np.float64)


def _draws(call: Any, module: Any, x: Any, keys: Any) -> Any:
    drawn = jax.vmap(lambda key: call(module, x, None, key))(keys)
    return call(module, x, None, None), drawn


def _check_draws(
    module: Any, still: np.ndarray, drawn: np.ndarray, rate: float | None
) -> str | None:
    noise = drawn - still
    size = np.sqrt(np.mean(noise**2))
    tiny = 1e-6 * size_of(still)
    if size_of(still - still[:1]) > 100 * tiny:
        return "without a key, alike rows of a batch give different outputs: is something dropped?"
    if size_of(drawn - drawn[0]) <= tiny:
        if size > tiny:
            return "the key is ignored: any key gives the same, which differs from none."
        if _has_dropout(module, rate):
            return "a key changes nothing, though the block has dropout."
        raise NotApplicableError("a key changes nothing: it has no dropout")
    alike = np.mean(noise[:, 0] * noise[:, 1]) / np.mean(noise[:, 0] ** 2)
    patterns = np.unique(np.round(noise[:, 0].reshape(DRAWS, -1) / size, 3), axis=0)
    if alike > 0.5 and len(patterns) > 8:  # fewer: whole layers are dropped
        return "the same is dropped in all rows of a batch."
    return None


def _has_dropout(module: Any, rate: float | None) -> bool:
    for part in modules_in(module):
        for name in vars(part):
            value = getattr(part, name)
            is_share = isinstance(value, float) and 0 < value < 1
            if is_share and (value == rate or "drop" in name or isinstance(part, eqx.nn.Dropout)):
                return True
    return False


def check_auxiliary(s: Subject) -> str | None:
    """The auxiliary loss is a mean over rows without their padding, and has a gradient."""
    if s.aux_loss is None:
        raise NotApplicableError("it has no auxiliary loss")
    compute, short = s.compiled(s.aux_loss), s.seq - 3

    def aux_loss(x, lengths=None):
        return np.asarray(compute(s.module, x, lengths), np.float64)

    plain = aux_loss(s.x)
    if plain.shape != ():
        return f"the auxiliary loss has the shape {list(plain.shape)}, and is not a number."
    if plain == 0:
        raise NotApplicableError("its auxiliary loss is 0")
    lengths = np.full(len(s.x), short, np.int32)
    padded = np.concatenate([s.x[:, :short], 10 * s.other[:, short:]], axis=1)
    ways = {
        "of all rows twice": (aux_loss(np.concatenate([s.x, s.x])), plain),
        "with padding": (aux_loss(padded, lengths), aux_loss(s.x[:, :short])),
    }
    for what, (value, wanted) in ways.items():
        if not abs(value - wanted) <= SAME * abs(wanted):
            return f"the auxiliary loss {what} is {value:.6g}, and {wanted:.6g} without."
    lengths = np.array([s.seq, short, s.seq // 2], np.int32)
    real = (np.arange(s.seq) < lengths[:, None]).reshape(*s.x.shape[:2], *(1,) * (s.x.ndim - 2))
    one, other = (aux_loss(np.where(real, s.x, x), lengths) for x in (s.x, 10 * s.other))
    if not abs(one - other) <= SAME * abs(one):
        return (
            "the auxiliary loss depends on padding, where rows have different lengths: it is "
            f"{one:.6g}, and {other:.6g} with other padding."
        )
    if not is_finite(aux_loss(s.x, np.arange(len(s.x), dtype=np.int32))):
        return "the auxiliary loss is not finite, where a row of a batch has no token or one."
    params, static = eqx.partition(s.module, eqx.is_inexact_array)

    aux_loss_of = s.aux_loss

    def loss(params, x):
        return jnp.sum(aux_loss_of(eqx.combine(params, static), x, None))

    for what, x in odd_inputs(s).items():
        if not is_finite((aux_loss(x), s.compiled(jax.grad(loss))(params, x))):
            return f"the auxiliary loss, or its gradient, is not finite for {what}."
    grads = s.compiled(jax.grad(loss))(params, s.x)
    if not any(np.asarray(grad).any() for grad in jax.tree.leaves(grads)):
        return "the auxiliary loss has no gradient: look at a stop_gradient, or at a choice."
    return None
