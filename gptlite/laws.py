"""The laws that `gptlite.testing.check_block` checks, for each kind of block."""

import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gptlite.config import ModelConfig
from gptlite.models.encoder import Encoder
from gptlite.models.gpt import GPT
from gptlite.models.seq2seq import Seq2Seq
from gptlite.nn.block import require_pair
from gptlite.nn.embedding import Embedding
from gptlite.nn.masks import Bidirectional
from gptlite.nn.stack import Stack
from gptlite.sharding import path_name
from gptlite.training.optimizer import inside
from gptlite.training.step import cast

LAWS = (
    *("shapes", "parameters", "jit", "causal", "both ways", "batch"),
    *("cached", "padding", "gradients", "bfloat16", "scan"),
)

BATCH = 3
SMALL = ModelConfig(n_layers=2, n_heads=2, d_model=16, context_length=8)

# Of the largest number that is compared. float32 holds 6e-8; sums of a few hundred terms in
# another order differ by some ten times that, a mistake by orders of magnitude more.
SAME = 1e-4
# A derivative that is not there is 0; this is for blocks that mix by Fourier transforms.
NO_INFLUENCE = 1e-6
# Central differences in float64. Two sizes, because a kink or a choice (ReLU, top-k) may lie
# within one of them; and parts of a block may compute in float32.
DIFFERENCES, DERIVATIVE = (1e-3, 1e-5), 2e-2
# bfloat16 holds 8 bits: 0.4 % a rounding, some ten of them in a row.
BFLOAT16 = 0.1


class Broken(Exception):  # noqa: N818 - carries a finding, not an error
    """What breaks a law, in a sentence."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """`layer(x) -> y`, and the laws; the other kinds are below."""

    block: Any
    x: Any
    """`[batch, seq, d_model]`."""
    other: Any
    """More of the same."""
    idle: Sequence[str]
    """Parameters that need not have a gradient."""
    causal: bool
    kind = "layer"
    seq_axis = -2
    """Of what goes in."""

    def run(self, block: Any, x: Any, **options: Any) -> Any:
        return block(x, **options)

    def in_parts(self, x: Any, ends: Sequence[int], **options: Any) -> Any:
        """The outputs for `x` cut at `ends`, one part after the other, joined."""
        del options  # without a cache, there is no mask for one
        parts = jnp.split(x, list(ends), axis=self.seq_axis)
        return jnp.concatenate([self.compiled(self.block, part) for part in parts], axis=-2)

    def expected(self, x: Any, dtype: Any = jnp.float32) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype of what should come out, with parameters and numbers in `dtype`."""
        return x.shape, dtype

    def does_not_apply(self) -> Iterator[str]:
        """Laws that say nothing of such a block."""
        yield from ("scan", *self.of_the_other_direction())
        if not self.takes_padding_mask():
            yield "padding"

    def of_the_other_direction(self) -> Sequence[str]:
        """What sees later tokens cannot be read in portions."""
        return ("both ways",) if self.causal else ("causal", "cached")

    def takes_padding_mask(self) -> bool:
        mask = jnp.ones(self.x.shape[:2], bool)
        run = functools.partial(self.run, padding_mask=mask)
        try:
            eqx.filter_eval_shape(run, self.block, self.x)
        except TypeError as error:
            # Python's own, and not a kind of it that a wrong annotation raises.
            return type(error) is not TypeError or "padding_mask" not in str(error)
        except Exception:
            pass  # it takes one, and the law will say what is wrong
        return True

    def compiled(self, block: Any, x: Any, **options: Any) -> Any:
        return _compiled(self.run, block, x, **options)

    def check_shapes(self) -> None:
        for x in (self.x, self.x[0]):
            for dtype in (jnp.float32, jnp.bfloat16):
                given = cast(x, dtype)
                out = eqx.filter_eval_shape(self.run, cast(self.block, dtype), given)
                shape, wanted = self.expected(given, dtype)
                if out.shape != shape or out.dtype != wanted:
                    raise Broken(
                        f"{given.dtype}{list(given.shape)} in, {out.dtype}{list(out.shape)} out "
                        f"instead of {jnp.dtype(wanted)}{list(shape)}."
                    )

    def check_parameters(self) -> None:
        for module in _modules(self.block):
            for field in dataclasses.fields(module):
                value = getattr(module, field.name, None)
                if field.metadata.get("static", False) and isinstance(
                    value, jax.Array | np.ndarray
                ):
                    raise Broken(
                        f"{type(module).__name__}.{field.name} is an array in a static field, "
                        "which is neither trained nor saved."
                    )

    def check_jit(self) -> None:
        compiled = self.compiled(self.block, self.x)
        _compare(self.run(self.block, self.x), compiled, "not compiled", "compiled")
        _compare(self.run(self.block, self.x), compiled, "called again", "compiled")

    def check_causal(self) -> None:
        influence = self.influence()
        if not np.isfinite(influence).all():
            raise Broken("a gradient to the input is not finite.")
        later = np.triu(influence, k=1)
        if later.max() > NO_INFLUENCE * influence.max():
            i, j = np.unravel_index(later.argmax(), later.shape)
            raise Broken(
                f"the output at position {i} depends on the input at position {j}: the gradient "
                f"is {later[i, j]:.2g}, and the largest of all {influence.max():.2g}."
            )
        # What no derivative shows, as the place of a maximum, a change may.
        for options in self.ways_to_call():
            before = self.compiled(self.block, self.x, **options)
            for place in range(1, self.x.shape[1]):
                changed = self.x.at[:, place:].set(self.other[:, place:])
                after = self.compiled(self.block, changed, **options)
                what = f"with other inputs from position {place} on"
                what += " (given a key)" * ("key" in options)
                _compare(after[:, :place], before[:, :place], what, "before")

    def check_both_ways(self) -> None:
        influence = self.influence()
        if not influence.min() > NO_INFLUENCE * influence.max():
            i, j = np.unravel_index(influence.argmin(), influence.shape)
            raise Broken(f"the output at position {i} does not depend on the input at {j}.")

    def ways_to_call(self) -> Sequence[dict[str, Any]]:
        """Without a key, as in evaluation, and where it takes one with it, as in training."""
        return ({},)

    def influence(self) -> np.ndarray:
        """`[seq, seq]`: how much the output at a position depends on the input at another."""
        direction = jax.random.normal(jax.random.key(1), self.x.shape[-1:])
        jacobian = jax.jacrev(lambda x, block: self.run(block, x) @ direction)
        block = eqx.nn.inference_mode(self.block)
        return np.asarray(jnp.abs(eqx.filter_jit(jacobian)(self.x[0], block)).sum(-1))

    def check_batch(self) -> None:
        together = self.compiled(self.block, self.x)
        for row, x in enumerate(self.x):
            alone = self.compiled(self.block, x)
            _compare(together[row], alone, f"sequence {row} in a batch", "alone")
        mapped = eqx.filter_jit(eqx.filter_vmap(self.run, in_axes=(None, 0)))
        _compare(mapped(self.block, self.x), together, "under vmap", "as a batch")

    def check_cached(self) -> None:
        whole = self.compiled(self.block, self.x)
        one_by_one = range(1, self.x.shape[1])
        for what, ends in (("one token at a time", one_by_one), ("in portions", self.cuts())):
            _compare(self.in_parts(self.x, ends), whole, f"read {what}", "at once")
        # A cache without a batch axis, as generation makes one for a single text.
        alone = self.in_parts(self.x[0], self.cuts()[:1])
        _compare(alone, whole[0], "alone, read in portions", "at once")

    def cuts(self) -> tuple[int, int]:
        """Three portions."""
        seq = self.x.shape[1]
        return seq // 3, 2 * seq // 3

    def check_padding(self) -> None:
        seq = self.x.shape[1]
        padding = min(3, seq // 2)
        real = seq - padding
        whole = self.compiled(self.block, self.x[:, :real])
        for before in (0, 1, padding):
            padded = jnp.concatenate([self.x[:, :real], self.other[:, real:]], axis=1)
            padded = jnp.roll(padded, before, axis=1)
            inside = (jnp.arange(seq) >= before) & (jnp.arange(seq) < real + before)
            mask = jnp.broadcast_to(inside, self.x.shape[:2])
            what = f"with {before} places of padding before and {padding - before} after it"
            out = self.compiled(self.block, padded, padding_mask=mask)
            _compare(out[:, inside], whole, what, "without")
            alone = self.compiled(self.block, padded[0], padding_mask=mask[0])
            _compare(alone[inside], whole[0], f"alone, {what}", "without")
            if self.kind != "layer" and self.causal:
                out = self.in_parts(padded, self.cuts(), padding_mask=mask)
                _compare(out[:, inside], whole, f"cached, {what}", "without")

    def check_gradients(self) -> None:
        with jax.enable_x64(True):
            block = cast(eqx.nn.inference_mode(self.block), jnp.float64)
            x = cast(self.x, jnp.float64)
            params, static = eqx.partition(block, eqx.is_inexact_array)
            leaves, structure = jax.tree.flatten(params)
            if not leaves:
                return
            paths = jax.tree_util.tree_leaves_with_path(params)
            names = [path_name(path).removeprefix(_Targets.prefix) for path, _ in paths]
            random = np.random.default_rng(0)
            directions = [jnp.asarray(random.normal(size=leaf.shape)) for leaf in leaves]
            weights = jnp.asarray(
                random.normal(size=eqx.filter_eval_shape(self.run, block, x).shape)
            )

            def loss(leaves):
                block = eqx.combine(jax.tree.unflatten(structure, leaves), static)
                return jnp.sum(weights * jnp.sin(self.run(block, x)))

            def moved(steps):
                return loss(
                    [leaf + t * d for leaf, t, d in zip(leaves, steps, directions, strict=True)]
                )

            grads = jax.jit(jax.grad(loss))(leaves)
            stacked = jax.tree.leaves(inside(params, Stack))
            for name, grad, layers in zip(names, grads, stacked, strict=True):
                for layer, part in enumerate(grad if layers else [grad]):
                    of = name + (f" of layer {layer}" if layers else "")
                    if not np.isfinite(part).all():
                        raise Broken(f"the gradient of {of} is not finite.")
                    if name not in self.idle and not np.abs(part).max() > 1e-12:
                        raise Broken(
                            f"{of} changes nothing: its gradient is zero. (If it is known to do "
                            f"nothing, idle=[{name!r}].)"
                        )
            ours = np.array([jnp.vdot(g, d) for g, d in zip(grads, directions, strict=True)])
            eye = jnp.eye(len(leaves))
            ends = jax.jit(lambda steps: jax.lax.map(moved, steps))
            slopes = [np.asarray(ends(h * eye) - ends(-h * eye)) / (2 * h) for h in DIFFERENCES]
            error = np.min([np.abs(slope - ours) for slope in slopes], axis=0)
            size = np.maximum(np.abs(ours), np.abs(slopes).min(axis=0))
            # Next to nothing is compared with what is typical.
            wrong = error / np.maximum(size, 1e-3 * np.max(size)) > DERIVATIVE
            if wrong.any():
                i = int(wrong.argmax())
                raise Broken(
                    f"the gradient of {names[i]} is wrong: {ours[i]:.4g} along a direction "
                    f"in which the output changes by {slopes[-1][i]:.4g}."
                )

    def check_bfloat16(self) -> None:
        # What is compared is the arithmetic, not what parameters and inputs lose by rounding.
        block, x = cast(self.block, jnp.bfloat16), cast(self.x, jnp.bfloat16)
        half = np.asarray(self.compiled(block, x), np.float32)
        full = np.asarray(self.compiled(cast(block, jnp.float32), cast(x, jnp.float32)))
        error = np.linalg.norm(half - full, axis=-1) / np.linalg.norm(full, axis=-1).clip(1e-6)
        # The middle one: a choice, as of experts, may fall otherwise for a token here and there.
        if not np.median(error) < BFLOAT16:
            raise Broken(
                f"in bfloat16 the output is off by {np.median(error):.2g} of its size (the median "
                f"over positions; at most {BFLOAT16:g} is rounding)."
            )


class _Block(_Layer):
    """`block(x, cache, offset, *, key) -> (y, cache)`."""

    kind = "block"

    def run(self, block: Any, x: Any, **options: Any) -> Any:
        return require_pair(block, block(x, None, 0, **{"key": None, **options}), x)[0]

    def ways_to_call(self) -> Sequence[dict[str, Any]]:
        return ({}, {"key": jax.random.key(0)})

    def capacity(self) -> int:
        """Places that a cache has room for: more than are ever used."""
        return self.x.shape[1] + 3

    def init_cache(self, x: Any) -> Any:
        """An empty cache for `x`."""
        return self.block.init_cache(x.shape[:-2], self.capacity(), x.dtype)

    def extend(self, block: Any, x: Any, cache: Any, offset: Any, options: Any) -> Any:
        """Outputs for what follows the first `offset` places of the cache, and the new cache."""
        return block(x, cache, offset, key=None, **options)

    def in_parts(self, x: Any, ends: Sequence[int], **options: Any) -> Any:
        outputs, cache, done = [], self.init_cache(x), 0
        other = self.other if x.ndim == self.x.ndim else self.other[0]
        kind = _kind_of(cache)
        if "padding_mask" in options:
            unused = self.capacity() - x.shape[self.seq_axis]
            options["padding_mask"] = jnp.pad(options["padding_mask"], ((0, 0), (0, unused)))
        for part in jnp.split(x, list(ends), axis=self.seq_axis):
            length = part.shape[self.seq_axis]
            if done == 0:
                # Read with more behind it, as generation does, so that few programs serve prompts
                # of any length: what a cache holds beyond the offset must not matter.
                behind = jnp.split(other, [length], axis=self.seq_axis)[1]
                part = jnp.concatenate([part, behind], axis=self.seq_axis)
            y, cache = _compiled(self.extend, self.block, part, cache, jnp.asarray(done), options)
            if _kind_of(cache) != kind:
                raise Broken(f"a cache of {kind} comes back as one of {_kind_of(cache)}.")
            outputs.append(y[..., :length, :])
            done += length
        return jnp.concatenate(outputs, axis=-2)

    def does_not_apply(self) -> Iterator[str]:
        yield from self.of_the_other_direction()
        if not self.takes_padding_mask():
            yield "padding"

    def check_scan(self) -> None:
        def make(key):
            return jax.tree.map(
                lambda a: a * (1 + 0.1 * jax.random.normal(key)) if eqx.is_inexact_array(a) else a,
                self.block,
            )

        stacks = [Stack(make, 2, scan=scan, key=jax.random.key(0)) for scan in (False, True)]
        unrolled, scanned = (
            eqx.filter_jit(lambda stack, x: stack(x)[0])(stack, self.x) for stack in stacks
        )
        _compare(scanned, unrolled, "scanned", "unrolled")


class _Model(_Block):
    """`model(ids) -> logits`. With `init_cache`, `extend` and `logits` as `GPT` has them, it is
    checked cached, too."""

    kind = "model"
    seq_axis = -1

    def run(self, block: Any, x: Any, **options: Any) -> Any:
        return block(x, **options)

    def ways_to_call(self) -> Sequence[dict[str, Any]]:
        return super().ways_to_call() if isinstance(self.block, GPT | _Targets) else ({},)

    def capacity(self) -> int:
        return self.block.config.context_length

    def init_cache(self, x: Any) -> Any:
        return self.block.init_cache(x.shape[:-1])

    def extend(self, block: Any, x: Any, cache: Any, offset: Any, options: Any) -> Any:
        cache = eqx.tree_at(lambda cache: cache.length, cache, offset.astype(jnp.int32))
        hidden, cache = block.extend(x, cache, **options)
        return block.logits(hidden), cache

    def expected(self, x: Any, dtype: Any = jnp.float32) -> tuple[tuple[int, ...], Any]:
        return (*x.shape, _last_axis(self.block, x)), jnp.float32

    def does_not_apply(self) -> Iterator[str]:
        yield from ("scan", *self.of_the_other_direction())
        if not hasattr(self.block, "extend"):
            yield "cached"
        if not self.takes_padding_mask():
            yield "padding"

    def influence(self) -> np.ndarray:
        """By the gradients to the rows of the `Embedding`s that ids are looked up in. Every id of
        the sequence stands in it once; and because a table may be the head, too, only the logits
        of ids that do not stand in it are looked at."""
        ids, vocab = self.x[0], _vocab_size(self.block)
        direction = self.direction()
        block = eqx.nn.inference_mode(self.block)
        params, static = eqx.partition(block, eqx.is_inexact_array)
        leaves, structure = jax.tree.flatten(params)
        in_table = jax.tree.leaves(inside(params, (Embedding, eqx.nn.Embedding)))
        tables = [
            i
            for i, (leaf, table) in enumerate(zip(leaves, in_table, strict=True))
            if table and leaf.ndim == 2 and len(leaf) >= vocab
        ]
        if not tables:
            return np.eye(len(ids))  # only changes of the input can tell

        @jax.jit
        @jax.jacrev
        def jacobian(moved):
            new = list(leaves)
            for i, table in zip(tables, moved, strict=True):
                new[i] = table
            block = eqx.combine(jax.tree.unflatten(structure, new), static)
            return self.run(block, ids) @ direction

        by_row = [jnp.abs(table).sum(-1) for table in jacobian([leaves[i] for i in tables])]
        return np.asarray(sum(rows[:, ids] for rows in by_row))

    def direction(self) -> Any:
        """What of an output is looked at."""
        random = jax.random.normal(jax.random.key(1), (_last_axis(self.block, self.x),))
        return random.at[self.x[0]].set(0)


class _Encoder(_Model):
    """`encoder(ids) -> hidden`."""

    kind = "encoder"

    def expected(self, x: Any, dtype: Any = jnp.float32) -> tuple[tuple[int, ...], Any]:
        return (*x.shape, self.block.config.d_model), dtype

    def direction(self) -> Any:
        return jax.random.normal(jax.random.key(1), (self.block.config.d_model,))


class _Targets(eqx.Module):
    """An encoder-decoder as a model of its targets, whose sources are given."""

    model: Seq2Seq
    source: Any
    """`[seq]`, the same for all."""
    source_mask: Any = None
    """False where it has no token."""
    prefix = "model."

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def __call__(self, ids: Any, **options: Any) -> Any:
        batch = ids.shape[:-1]
        return self.model(self.sources(batch), ids, **self.masks(batch), **options)

    def init_cache(self, batch: tuple[int, ...]) -> Any:
        return self.model.init_cache(self.sources(batch), **self.masks(batch))

    def extend(self, ids: Any, cache: Any, **options: Any) -> Any:
        return self.model.decoder.extend(ids, cache, **options)

    def logits(self, hidden: Any) -> Any:
        return self.model.decoder.logits(hidden)

    def sources(self, batch: tuple[int, ...]) -> Any:
        return jnp.broadcast_to(self.source, (*batch, len(self.source)))

    def masks(self, batch: tuple[int, ...]) -> Any:
        if self.source_mask is None:
            return {}
        return {"source_mask": jnp.broadcast_to(self.source_mask, (*batch, len(self.source)))}


class _Seq2Seq(_Model):
    """`model(source, ids) -> logits`."""

    kind = "encoder-decoder"

    def of_the_other_direction(self) -> Sequence[str]:
        return ()

    def check_both_ways(self) -> None:
        model, source = self.block.model, self.block.source
        found = {
            "output": lambda source: _compiled(model, source, self.x[0]),
            "encoder's output": lambda source: _compiled(model.encode, source),
        }
        for what, run in found.items():
            before = run(source)
            for place in range(len(source)):
                moved = np.abs(run(source.at[place].set(source[place - 1])) - before).max(-1)
                if not moved.min() > NO_INFLUENCE * np.abs(before).max():
                    raise Broken(
                        f"the {what} at position {moved.argmin()} does not depend on the source "
                        f"at {place}."
                    )

    def check_batch(self) -> None:
        super().check_batch()
        # Each with a source of its own, of its own length, at its own place.
        seq = len(self.block.source)
        lengths, before = np.maximum(1, seq - np.arange(BATCH)), np.minimum(np.arange(BATCH), 1)
        sources = jnp.stack([jnp.roll(self.block.source, i) for i in range(BATCH)])
        places = np.arange(seq) - before[:, None]
        mask = jnp.asarray((places >= 0) & (places < lengths[:, None]))
        together = _compiled(self.block.model, sources, self.x, source_mask=mask)
        for row, x in enumerate(self.x):
            alone = _compiled(self.block.model, sources[row][mask[row]], x)
            _compare(together[row], alone, f"pair {row} in a batch, its source padded", "alone")

    def check_cached(self) -> None:
        super().check_cached()
        whole, source = self.compiled(self.block, self.x), self.block.source
        padded = _Targets(
            self.block.model,
            jnp.concatenate([source[:2], source, source[:1]]),
            jnp.array([False] * 2 + [True] * len(source) + [False]),
        )
        found = dataclasses.replace(self, block=padded).in_parts(self.x, self.cuts())
        _compare(found, whole, "cached, with padding before and after the source", "without")


def recognise(
    block: Any,
    d_model: int | None,
    causal: bool | None,
    seq: int,
    idle: Sequence[str],
    seed: int,
) -> _Layer:
    """Which of the kinds it is, found by calling it."""
    if causal is None:
        both_ways = any(isinstance(module, Bidirectional) for module in _modules(block))
        causal = isinstance(block, Seq2Seq) or not (both_ways or isinstance(block, Encoder))
    key = jax.random.key(seed)
    if isinstance(block, Encoder):
        return _Encoder(block, *_ids(block, seq, key), idle, causal)
    if isinstance(block, Seq2Seq):
        x, other = _ids(block, seq, key)
        # No token of it in the targets that derivatives are taken for: it may share their table.
        source = jnp.setdiff1d(jnp.arange(_vocab_size(block)), x[0])[:seq]
        return _Seq2Seq(_Targets(block, source), x, other, idle, causal)
    keys = jax.random.split(key, 2)
    widths = [d_model] if d_model else _widths(block)
    said: Exception | None = None
    for width in widths:
        x, other = (jax.random.normal(key, (BATCH, seq, width)) for key in keys)
        # As attention and blocks have; a model has `extend`, too.
        with_cache = hasattr(block, "init_cache") and not hasattr(block, "extend")
        arguments = (x, None, 0) if with_cache else (x,)
        options = {"key": None} if with_cache else {}
        try:
            out = eqx.filter_eval_shape(block, *arguments, **options)
        except Exception as error:
            said = said or error
            continue
        if with_cache:
            return _Block(block, x, other, idle, causal)
        if isinstance(out, tuple):
            raise Broken("it returns a pair, as attention does, and has no init_cache.")
        if out.shape == x.shape or d_model:
            return _Layer(block, x, other, idle, causal)
    try:
        return _Model(block, *_ids(block, seq, key), idle, causal)
    except Broken:
        raise
    except Exception as error:
        what = describe(said or error)
        raise Broken(
            "it takes neither [batch, seq, d_model], nor that, a cache and an offset (such a block "
            f"has init_cache), nor ids: it raised {what}"
        ) from error


def _ids(block: Any, seq: int, key: Any) -> tuple[Any, Any]:
    """Two batches of ids, no id twice in a sequence.

    **Raises:** `Broken` if the model is too small for that.
    """
    vocab = _vocab_size(block)
    context = getattr(getattr(block, "config", None), "context_length", seq)
    seq = min(seq, vocab // 2, context)
    if seq < 4:
        raise Broken(
            f"it is too small to be checked, with a vocabulary of {vocab} and a context of "
            f"{context}: at least 8 and 4 are needed."
        )
    x, other = (
        jnp.stack([jax.random.permutation(k, vocab)[:seq] for k in jax.random.split(half, BATCH)])
        for half in jax.random.split(key)
    )
    return x, other


def _widths(block: Any) -> list[int]:
    """What d_model may be, as parameters' shapes tell."""
    leaves = jax.tree.leaves(eqx.filter(block, eqx.is_inexact_array))
    sizes = {size for leaf in leaves for size in leaf.shape if size > 1}
    return sorted(sizes, reverse=True) or [SMALL.d_model]


def _vocab_size(block: Any) -> int:
    if isinstance(block, Encoder):
        return len(block.embedding.weight)
    if isinstance(block, _Targets):
        return _vocab_size(block.model)
    if isinstance(block, Seq2Seq):
        source = block.decoder if block.shares_embedding else block.encoder
        return min(len(source.embedding.weight), block.decoder.vocab_size)
    out = eqx.filter_eval_shape(block, jnp.zeros((1, 1), jnp.int32))
    if out.ndim != 3:
        raise Broken(
            f"it cannot be checked: it makes {list(out.shape)} of ids of the shape [1, 1], and not "
            "something for each of them. (Check its parts.)"
        )
    return out.shape[-1]


def _last_axis(block: Any, ids: Any) -> int:
    return eqx.filter_eval_shape(block, ids).shape[-1]


def _modules(tree: Any) -> Iterator[Any]:
    """All modules in `tree`."""
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, eqx.Module)):
        if isinstance(node, eqx.Module):
            yield node
            for field in dataclasses.fields(node):
                if not field.metadata.get("static", False):
                    yield from _modules(getattr(node, field.name, None))


def _kind_of(cache: Any) -> str:
    """Dtypes and shapes of a cache's arrays."""
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(cache))


@eqx.filter_jit
def _compiled(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


def _compare(found: Any, wanted: Any, what: str, than: str) -> None:
    """**Raises:** `Broken` if the two differ by more than rounding."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    error = np.nan_to_num(np.abs(found - wanted), nan=np.inf).max(axis=-1)
    size = np.abs(wanted).max()
    if not error.max() <= SAME * size:
        *_, place = np.unravel_index(error.argmax(), error.shape)
        raise Broken(
            f"{what}, the output at position {place} is off by {error.max():.2g} from {than} "
            f"(numbers are up to {size:.2g})."
        )


def describe(error: Exception) -> str:
    """An exception as a line, with the last place outside of packages that it came through."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = f"{type(error).__name__}: {' '.join(lines[:4])}"
    packages = ("site-packages", str(Path(__file__).parent), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename for part in packages):
            return f"{what} ({Path(frame.filename).name}, line {frame.lineno})"
    return what
