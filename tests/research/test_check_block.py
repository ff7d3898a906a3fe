"""`check_block` bites: what is right passes, and every planted bug is caught and named."""

import dataclasses
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_model
from jax import lax

from gptlite.cli import exit_on_error, parse_words
from gptlite.config import ModelConfig
from gptlite.errors import UserError
from gptlite.models.gpt import GPT
from gptlite.nn import WHOLE_SEQUENCE, Linear, RMSNorm, Rotary
from gptlite.nn.cache import write_at
from gptlite.research.check_block import SMALL, CheckError, check_block
from gptlite.scripts.check_block import check

D = 16


class OneHead(eqx.Module):
    """Attention with one head, in steps that a bug can be planted in."""

    query: Linear
    key: Linear
    value: Linear

    def __init__(self, config=SMALL, *, key):
        d_model = config.d_model
        self.query, self.key, self.value = (
            Linear(d_model, d_model, std=0.5, key=k) for k in jax.random.split(key, 3)
        )

    def init_cache(self, batch, capacity, dtype):
        return (jnp.zeros((*batch, capacity, D), dtype),) * 2

    def positions(self, x, start):
        return Rotary()(x[..., None, :, :], start)[..., 0, :, :]

    def write(self, cache, new, start):
        pairs = zip(cache, new, strict=True)
        return tuple(write_at(old, part, jnp.asarray(start), axis=-2) for old, part in pairs)

    def mask(self, queries, keys, start):
        places = jnp.asarray(start)[..., None] + jnp.arange(queries)
        return jnp.arange(keys) <= places[..., None]

    def weights(self, scores):
        return jax.nn.softmax(scores, axis=-1)

    def mix(self, weights, values):
        return (weights @ values.astype(weights.dtype)).astype(values.dtype)

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        start = context.start
        q, k = (self.positions(layer(x), start) for layer in (self.query, self.key))
        v = self.value(x)
        if cache is not None:
            cache = k, v = self.write(cache, (k, v), start)
        scores = (q @ jnp.swapaxes(k, -1, -2)).astype(jnp.promote_types(q.dtype, jnp.float32)) / 4
        seen = self.mask(q.shape[-2], k.shape[-2], start)
        return self.mix(self.weights(jnp.where(seen, scores, -1e9)), v), cache


class Sees1Ahead(OneHead):
    def mask(self, queries, keys, start):
        return super().mask(queries, keys, start + 1)


class SoftmaxOverQueries(OneHead):
    def weights(self, scores):
        return jax.nn.softmax(scores, axis=-2)


class RotaryForgetsTheStart(OneHead):
    def positions(self, x, start):
        return super().positions(x, 0)


class MaskForgetsTheStart(OneHead):
    def mask(self, queries, keys, start):
        return super().mask(queries, keys, 0)


class WritesOneTooFar(OneHead):
    def write(self, cache, new, start):
        return super().write(cache, new, start + 1)


class SeesAllOfTheCache(OneHead):
    def mask(self, queries, keys, start):
        whole = super().mask(queries, keys, start)
        return whole if queries == keys and isinstance(start, int) else jnp.ones_like(whole)


class OneStartForAllRows(OneHead):
    def write(self, cache, new, start):
        return super().write(cache, new, jnp.max(jnp.asarray(start)))


class ValuesWithoutGradient(OneHead):
    def mix(self, weights, values):
        return super().mix(weights, lax.stop_gradient(values))


class LastCacheOfTheBatch(OneHead):
    def mix(self, weights, values):
        return super().mix(weights, jnp.broadcast_to(values[-1:], values.shape))


class CacheOfABatchOnly(OneHead):
    def init_cache(self, batch, capacity, dtype):
        return super().init_cache(batch[:1] or (1,), capacity, dtype)


class Layer(eqx.Module):
    """An MLP, right as it stands."""

    up: Linear
    down: Linear

    def __init__(self, config=SMALL, *, key):
        up_key, down_key = jax.random.split(key)
        self.up = Linear(config.d_model, 24, std=0.5, key=up_key)
        self.down = Linear(24, config.d_model, std=0.0, key=down_key)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


class NormOverTime(Layer):
    def __call__(self, x):
        return super().__call__(x / jnp.sqrt(jnp.mean(x**2, axis=-2, keepdims=True) + 1e-6))


class NormOverTheBatch(Layer):
    def __call__(self, x):
        if x.ndim == 3:
            x = x - jnp.mean(x, axis=0)
        return super().__call__(x)


class LooksForTheLargest(Layer):
    """Its output depends on a later token through a choice, which has no derivative."""

    def __call__(self, x):
        place = jnp.argmax(x[..., 0], axis=-1)
        return super().__call__(x) * (1 + place[..., None, None]).astype(x.dtype)


class Unused(Layer):
    spare: Linear

    def __init__(self, config=SMALL, *, key):
        super().__init__(config, key=key)
        self.spare = Linear(config.d_model, 4, std=0.5, key=key)


class StaticGain(Layer):
    gain: np.ndarray = eqx.field(static=True)

    def __init__(self, config=SMALL, *, key):
        super().__init__(config, key=key)
        self.gain = np.full(config.d_model, 2.0, np.float32)

    def __call__(self, x):
        return super().__call__(x) * jnp.asarray(self.gain, x.dtype)


class LowPrecision(Layer):
    gain: jax.Array

    def __init__(self, config=SMALL, *, key):
        super().__init__(config, key=key)
        self.gain = jnp.ones(config.d_model, jnp.bfloat16)

    def __call__(self, x):
        return super().__call__(x) * self.gain.astype(x.dtype)


@jax.custom_vjp
def half(x):
    return 0.5 * x


half.defvjp(lambda x: (half(x), None), lambda _, grad: (grad,))


class WrongBackwardPass(Layer):
    def __call__(self, x):
        return half(super().__call__(x))


class WrongInputGradient(Layer):
    def __call__(self, x):
        return super().__call__(half(x))


class Cuts(Layer):
    def __call__(self, x):
        return super().__call__(jax.lax.stop_gradient(x))


class HalfWithoutParameters(eqx.Module):
    def __init__(self, config, *, key):
        pass

    def __call__(self, x):
        return half(x)


class InfiniteSlope(Layer):
    def __call__(self, x):
        y = super().__call__(x)
        return y * jnp.sqrt(jnp.sum(0 * y, axis=-1, keepdims=True))


class Widens(Layer):
    def __call__(self, x):
        return super().__call__(x).astype(jnp.float32)


class DropsAToken(Layer):
    def __call__(self, x):
        return super().__call__(x)[..., 1:, :]


class NeedsAKey(Layer):
    dropout: eqx.nn.Dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x):
        return self.dropout(super().__call__(x))


class NoDefaults(eqx.Module):
    """The shortest call that training and generation make do with."""

    inner: OneHead

    def __init__(self, config=SMALL, *, key):
        self.inner = OneHead(config, key=key)

    def init_cache(self, batch, capacity, dtype):
        return self.inner.init_cache(batch, capacity, dtype)

    def __call__(self, x, cache, context, *, key) -> Any:
        return self.inner(x, cache, context, key=key)


class ReturnsNoCache(NoDefaults):
    def __call__(self, x, cache, context, *, key):
        return super().__call__(x, cache, context, key=key)[0]


class LooksAheadInTraining(OneHead):
    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        y, cache = super().__call__(x, cache, context)
        return (y if key is None else y + jnp.roll(y, -1, axis=-2)), cache


class ForgetsTheCapacity(OneHead):
    def write(self, cache, new, start):
        return super().write(cache, new, start) if new[0].shape[1] < 8 else new


class RunningMean(eqx.Module):
    """A recurrent state: the sum of all values, and how many they are."""

    value: Linear

    def __init__(self, config=SMALL, *, key):
        self.value = Linear(config.d_model, config.d_model, std=0.5, key=key)

    def init_cache(self, batch, capacity, dtype):
        return jnp.zeros((*batch, D)), jnp.zeros((*batch, 1))

    def real(self, x, context):
        lengths = x.shape[-2] if context.lengths is None else context.lengths[..., None]
        return jnp.broadcast_to(jnp.arange(x.shape[-2]) < lengths, x.shape[:-1])[..., None]

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        real = self.real(x, context)
        v = jnp.where(real, self.value(x).astype(jnp.float32), 0)
        total, count = jnp.cumsum(v, axis=-2), jnp.cumsum(real.astype(jnp.float32), axis=-2)
        if cache is not None:
            total, count = cache[0][..., None, :] + total, cache[1][..., None, :] + count
            cache = total[..., -1, :], count[..., -1, :]
        return (total / jnp.maximum(count, 1)).astype(x.dtype), cache


class StateThatReadsPadding(RunningMean):
    def real(self, x, context):
        return jnp.ones((*x.shape[:-1], 1), bool)


class StateThatReadsOnePaddingTooMany(RunningMean):
    def real(self, x, context):
        real = super().real(x, context)
        return real | jnp.roll(real, 1, axis=-2)


counter = itertools.count(1)


class KeepsCount(Layer):
    def __call__(self, x):
        return super().__call__(x) * next(counter)


class LosesDigits(Layer):
    """The mean square of small numbers beside a large one, in the format of the input."""

    def __call__(self, x):
        large = jnp.asarray(256.0, x.dtype)
        return super().__call__((x + large) - large)


class FixesTheDtype(Layer):
    """A carry that is float32, whatever the input is."""

    def __call__(self, x):
        def step(carry, x):
            carry = 0.5 * carry + x
            return carry, carry

        x = jnp.moveaxis(super().__call__(x), -2, 0)
        _, y = jax.lax.scan(step, jnp.zeros(x.shape[1:], jnp.float32), x)
        return jnp.moveaxis(y, 0, -2)


BUGS = {
    FixesTheDtype: ("gradients", "take that of the input, x.dtype"),
    Sees1Ahead: ("causal", "at position 0 depends on inputs from position 1 on"),
    SoftmaxOverQueries: ("causal", "depends on inputs from position"),
    NormOverTime: ("causal", "depends on inputs from position"),
    LooksForTheLargest: ("causal", "depends on inputs from position"),
    RotaryForgetsTheStart: ("cached", "decoding token by token"),
    MaskForgetsTheStart: ("cached", "at position"),
    WritesOneTooFar: ("cached", "at position"),
    SeesAllOfTheCache: ("cached", "at position"),
    OneStartForAllRows: ("cached", "decoding in chunks of a different length in each row"),
    StateThatReadsPadding: ("cached", "decoding token by token"),
    StateThatReadsOnePaddingTooMany: ("cached", "decoding token by token"),
    LooksAheadInTraining: ("causal", "(given a key)"),
    CacheOfABatchOnly: ("cached", "must have the same rank"),
    ForgetsTheCapacity: ("cached", "is returned as one of float32[3, 8, 16]"),
    ReturnsNoCache: ("shapes", "ReturnsNoCache must return (y, cache), as attention"),
    NeedsAKey: ("shapes", "Dropout requires a key"),
    NormOverTheBatch: ("batch", "sequence 0 of a batch"),
    LastCacheOfTheBatch: ("batch", "of a batch"),
    ValuesWithoutGradient: ("gradients", "value.weight"),
    Unused: ("gradients", "the gradient of spare.weight is zero"),
    WrongBackwardPass: ("gradients", "is wrong"),
    WrongInputGradient: ("gradients", "the gradient of the input is wrong"),
    Cuts: ("gradients", "the gradient of the input is zero"),
    HalfWithoutParameters: ("gradients", "the gradient of the input is wrong"),
    InfiniteSlope: ("gradients", "is not finite"),
    StaticGain: ("parameters", "StaticGain.gain is an array in a static field"),
    LowPrecision: ("parameters", "gain is in bfloat16 instead of float32"),
    Widens: ("shapes", "bfloat16[3, 8, 16] in, float32[3, 8, 16] out"),
    DropsAToken: ("shapes", "[3, 7, 16] out"),
    KeepsCount: ("jit", "a second compilation"),
    LosesDigits: ("bfloat16", "off by"),
}


def test_a_gradient_of_the_input_may_be_zero_by_design():
    check_block(Cuts, zero_grad=["the input"], checks=["gradients"])


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")  # Equinox sees one as well
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught_and_named(bug):
    check, words = BUGS[bug]
    with pytest.raises(CheckError) as found:
        check_block(bug, checks=[check])
    assert found.value.checks == (check,)
    lines = [line for line in str(found.value).splitlines() if line.startswith(f"  {check}: ")]
    assert len(lines) == 1
    assert words in lines[0]
    assert str(found.value).startswith(f"{bug.__name__} fails:")


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_attention_that_mixes_documents_is_caught(positions):
    mixes = tiny_model(attention=OneHead, positions=positions, separate_documents=True)
    with pytest.raises(CheckError, match="documents: a document from position 1 on differs"):
        check_block(mixes, checks=["documents"])


def test_unknown_checks_are_refused():
    with pytest.raises(UserError, match=r"no check \['casual'\]: there are parameters, shapes"):
        check_block(Layer, checks=["causal", "casual"])


def test_unknown_parameters_in_zero_grad_are_refused():
    with pytest.raises(UserError, match=r"no parameter \['spare'\] in Unused"):
        check_block(Unused, zero_grad=("spare",))


def test_all_failures_are_reported():
    with pytest.raises(CheckError) as found:
        check_block(Sees1Ahead)
    assert set(found.value.checks) >= {"causal", "cached", "padding"}


def test_the_blocks_without_bugs_pass():
    report = check_block(OneHead)
    assert str(report) == (
        "OneHead (block, d_model 16, 768 parameters) passes: parameters, shapes, jit, causal, "
        "batch, cached, padding, gradients, bfloat16, scan"
    )
    assert set(report.checks) - set(check_block(Layer).checks) == {"padding", "scan"}
    assert set(check_block(RunningMean).checks) == set(report.checks)


def test_a_block_need_not_have_defaults():
    assert "scan" in check_block(NoDefaults).checks


class Undeclared(eqx.Module):
    """Keeps what it does not declare."""

    def __init__(self, config, *, key):
        self.beta = 1.0


def test_modules_and_classes_are_accepted():
    block = Layer(dataclasses.replace(SMALL, d_model=12), key=jax.random.key(0))
    assert check_block(block, d_model=12).parameters == 2 * 12 * 24
    with pytest.raises(CheckError, match="d_model must be given to check the layer"):
        check_block(block)
    with pytest.raises(CheckError, match="shapes: it raised TypeCheckError"):
        check_block(block, d_model=13)
    with pytest.raises(CheckError, match="it cannot be built: TypeError"):
        check_block(RMSNorm)
    with pytest.raises(CheckError, match=r"field 'beta' .*: its class does not declare that"):
        check_block(Undeclared)


def test_parameters_named_in_zero_grad_may_have_no_gradient():
    with pytest.raises(CheckError):
        check_block(Unused)
    assert "gradients" in check_block(Unused, zero_grad=("spare.weight",)).checks


def test_small_models_and_complex_parameters_are_refused():
    config = ModelConfig(n_layers=1, n_heads=1, d_model=4, context_length=5)
    with pytest.raises(CheckError, match="with a vocabulary of 9 and a context of 5"):
        check_block(GPT(config, 9, key=jax.random.key(0)))
    spectrum = eqx.tree_at(
        lambda it: it.up.weight, Layer(key=jax.random.key(0)), 1j * jnp.ones((24, 16))
    )
    with pytest.raises(CheckError, match="parameters: complex"):
        check_block(spectrum, d_model=16)


def test_a_classifier_of_whole_texts_is_refused():
    class Classifier(eqx.Module):
        model: GPT

        def __call__(self, ids):
            return self.model(ids).mean(-2)

    with pytest.raises(CheckError, match=r"cannot be checked: it makes \[1, 13\]"):
        check_block(Classifier(tiny_model()), kind="model")


def test_the_command_line(tmp_path, capsys):
    source = (
        "from test_check_block import Unused, Layer\n"
        "class Mine(Layer): pass\n"
        "class Bad(Unused): pass\n"
        "class Scaled(Layer):\n"
        "    by: float\n"
        "    def __init__(self, config, *, by: float = 1.0, key):\n"
        "        super().__init__(config, key=key)\n"
        "        self.by = by\n"
        "    def __call__(self, x):\n"
        "        return self.by * super().__call__(x)\n"
    )
    (tmp_path / "mine_to_check.py").write_text(source)

    def run(*words):
        try:
            with exit_on_error():
                parse_words(check, words, prog="check_block")
        except SystemExit as stop:
            return stop.code, capsys.readouterr()
        return 0, capsys.readouterr()

    file = str(tmp_path / "mine_to_check.py")
    code, said = run(f"{file}:Mine")
    assert (code, said.out.split()[:2]) == (0, ["Mine", "(layer,"])
    code, said = run(f"{file}:Bad")
    assert (code, said.out.splitlines()[0]) == (1, "Bad fails:")
    assert run(f"{file}:Bad", "--zero-grad", "spare.weight")[0] == 0
    code, said = run(f"{file}:Unused")
    assert (code, said.out) == (2, "")
    assert "Unused in" in said.err
    assert "is another name for" in said.err
    assert run("nonsense")[0] == 2
    assert run(f"{file}:Scaled:by=0")[0] == 1  # no parameter has a gradient
    code, said = run(f"{file}:Scaled:rank=2")
    assert code == 2
    assert "has no option rank: its options are by" in said.err
    code, said = run(f"{file}:Bad", "--zero-grads", "spare.weight")
    assert (code, said.err) == (
        2,
        "error: There is no option --zero-grads: did you mean --zero-grad?\n",
    )
