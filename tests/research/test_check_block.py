"""`check_block` bites: what is right passes, and every planted bug is caught and named."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, tiny_model
from jax import lax
from support.blocks import Layer, OneHead, RunningMean

from gptlite.cli import exit_on_error, parse_words
from gptlite.config import ModelConfig
from gptlite.errors import UserError
from gptlite.models.gpt import GPT
from gptlite.nn import WHOLE_SEQUENCE, Linear, RMSNorm
from gptlite.research.check_block import SMALL, CheckError, check_block
from gptlite.research.laws import LAWS, sentence
from gptlite.scripts.check_block import check


class Sees1Ahead(OneHead):
    def mask(self, queries, keys, start):
        return super().mask(queries, keys, start + 1)


class SoftmaxOverQueries(OneHead):
    def softmax(self, scores):
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
        return super().write(cache, new, start) if new[0].shape[1] < 16 else new


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


BUGS = {
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
    ForgetsTheCapacity: ("cached", "is returned as one of float32[3, 21, 16]"),
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
    Widens: ("shapes", "bfloat16[3, 1, 16] in, float32[3, 1, 16] out"),
    DropsAToken: ("shapes", "[3, 0, 16] out"),
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
    with pytest.raises(CheckError, match="documents: a document between others differs"):
        check_block(mixes, checks=["documents"])


def test_unknown_checks_are_refused():
    with pytest.raises(UserError, match=r"no law \['casual'\]: there are parameters, shapes"):
        check_block(Layer, checks=["causal", "casual"])


def test_unknown_parameters_in_zero_grad_are_refused():
    with pytest.raises(UserError, match=r"no parameter \['spare'\] in Unused"):
        check_block(Unused, zero_grad=("spare",))


def test_all_failures_are_reported():
    with pytest.raises(CheckError) as found:
        check_block(Sees1Ahead)
    assert set(found.value.checks) >= {"causal", "cached", "lengths"}


def test_the_blocks_without_bugs_pass():
    report = check_block(OneHead)
    assert str(report) == (
        "OneHead (block, d_model 16, 768 parameters) passes: parameters, shapes, memory, build, "
        "jit, causal, backward, batch, cached, padding, lengths, gradients, bfloat16, extremes, "
        "scan\n"
        "  left open: sees: sees says what the output must depend on: all earlier, window(64), or "
        "a function\n"
        "  left open: documents: documents are kept apart only if the config has "
        "separate_documents\n"
        "  left open: reference: a wrong formula shows only beside another form of it, which "
        "reference names\n"
        "  left open: more than 41 tokens: seq looks at what begins later"
    )
    assert report.does_not_apply == {
        "bidirectional": "it is causal",
        "dropout": "a key changes nothing: it has no dropout",
        "auxiliary": "its auxiliary loss is 0",
        "weights": "it has no method weights",
        "transfer": "it is of whole models",
    }
    assert set(report.checks) - set(check_block(Layer).checks) == {"padding", "scan"}
    assert set(check_block(RunningMean).checks) == set(report.checks)


def test_a_block_need_not_have_defaults():
    assert "scan" in check_block(NoDefaults).checks


class Undeclared(eqx.Module):
    """Keeps what it does not declare."""

    def __init__(self, config, *, key):
        self.beta = 1.0


class NoModule:
    def __init__(self, config, *, key):
        self.layer = Layer(config, key=key)

    def __call__(self, x):
        return self.layer(x)


class ReturnsAList(Layer):
    def __call__(self, x) -> Any:
        return [x]


class NoCache(eqx.Module):
    """An attention that cannot decode."""

    inner: OneHead

    def __init__(self, config, *, key):
        self.inner = OneHead(config, key=key)

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        return self.inner(x, cache, context, key=key)


class WholeBlock(NoCache):
    def init_cache(self, batch, capacity, dtype, context):
        return self.inner.init_cache(batch, capacity, dtype)

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None) -> Any:
        return (*super().__call__(x, cache, context, key=key), 0.0)


class WholeBlockWithoutContext(NoCache):
    def init_cache(self, batch, capacity, dtype):
        return self.inner.init_cache(batch, capacity, dtype)

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None) -> Any:
        return (*super().__call__(x, cache, context, key=key), 0.0)


@pytest.mark.parametrize(
    ("block", "kind", "words"),
    [
        (NoModule, None, "parameters: NoModule is no equinox.Module"),
        (ReturnsAList, None, "must return an array like its input, and returned a list"),
        (NoCache, None, r"returned a tuple. \(An attention, or a whole block, has a method"),
        (NoCache, "block", r"shapes: NoCache has no method init_cache\(batch, capacity, dtype\)"),
        (
            WholeBlockWithoutContext,
            None,
            r"init_cache must take \(batch, capacity, dtype, context\)",
        ),
    ],
)
def test_what_is_no_block_is_said(block, kind, words):
    with pytest.raises(CheckError, match=words):
        check_block(block, kind=kind)


def test_the_cache_of_a_whole_block_is_given_the_context():
    assert "cached" in check_block(WholeBlock).checks


def test_modules_and_classes_are_accepted():
    block = Layer(dataclasses.replace(SMALL, d_model=12, n_heads=2), key=jax.random.key(0))
    assert check_block(block, d_model=12).parameters == 2 * 12 * 24
    with pytest.raises(CheckError, match="d_model must be given to check the layer"):
        check_block(block)
    with pytest.raises(CheckError, match="shapes: it raised TypeCheckError"):
        check_block(block, d_model=13)
    with pytest.raises(CheckError, match="it cannot be built: TypeError"):
        check_block(RMSNorm)
    with pytest.raises(UserError, match="seq must be at least 4, got 3"):
        check_block(Layer, seq=3)
    with pytest.raises(UserError, match="skip must be a list of names, got 'causal'"):
        check_block(Layer, skip="causal")
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
        "from support.blocks import Layer\n"
        "from test_check_block import Unused\n"
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
    code, said = run("--list")
    names = [line.split()[0] for line in said.out.splitlines()]
    assert (code, names) == (0, list(LAWS))
    code, said = run(f"{file}:Mine", "--json", "--skip", "gradients", "--seq", "12")
    record = json.loads(said.out)
    assert code == 0
    assert record["left_out"]["gradients"] == "left out, as skip says"
    assert record["does_not_apply"]["padding"] == "it has no padding"
    assert "causal" in record["checks"]
    code, said = run(f"{file}:Bad", "--json")
    assert code == 1
    assert list(json.loads(said.out)["failures"]) == ["gradients"]
    code, said = run(f"{file}:Mine", "--skip", "casual")
    assert (code, "There is no law ['casual']: there are parameters," in said.err) == (2, True)
    code, said = run(f"{file}:Scaled:by=2", "--reference", f"{file}:Mine")
    assert (code, said.out.splitlines()[0]) == (1, "Scaled fails:")
    assert "reference: the output differs from the reference's by" in said.out
    assert run(f"{file}:Scaled:by=2", "--reference", f"{file}:Scaled:by=3")[0] == 2
    code, said = run(f"{file}:Mine", "--sees", "window(1)")
    assert (code, "sees, batch" in said.out) == (0, True)
    code, said = run(f"{file}:Mine", "--model.d-model", "24", "--model.n-heads", "2")
    assert (code, "d_model 24" in said.out) == (0, True)
    code, said = run(f"{file}:Bad", "--zero-grads", "spare.weight")
    assert (code, said.err) == (
        2,
        "error: There is no option --zero-grads: did you mean --zero-grad?\n",
    )


def test_the_docs_list_the_laws():
    page = (ROOT / "docs" / "blocks.md").read_text(encoding="utf-8")
    rows = [f"| `{name}` | {sentence(name)} |" for name in LAWS]
    assert "\n".join(["| law | what holds |", "| --- | --- |", *rows, ""]) in page


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux lists the maps of memory")
def test_the_programs_of_a_check_are_dropped():
    """A process may have 65,530 maps."""

    def maps():
        return len(Path("/proc/self/maps").read_text().splitlines())

    laws = ["jit", "batch", "gradients", "extremes"]
    counts = []
    for seed in range(3):
        check_block(Layer, checks=laws, seed=seed)
        counts.append(maps())
    assert counts[2] - counts[1] < 20  # a check compiles programs with 100 maps
