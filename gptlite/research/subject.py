"""The subject of the laws: a block, its inputs, and how it is called."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gptlite.errors import UserError, require
from gptlite.family.encoder import Encoder
from gptlite.family.seq2seq import Seq2Seq
from gptlite.nn.context import WHOLE_SEQUENCE, Context

BATCH = 3
# Tokens of a long sequence, and of one that takes less time: bfloat16 counts to 256.
FAR = (1024, 512)
# Options of XLA for quick compilation.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
}
# The fields of a config that are shares of dropout.
RATE_FIELDS = ("dropout", "attention_dropout")

Kind = Literal["layer", "block", "model", "encoder", "encoder-decoder"]
# Whether the output at a position must depend on the input at another one: `sees(out, in)`.
Sees = Callable[[int, int], bool]


@dataclass(frozen=True, eq=False)
class Subject:
    """A block, its inputs, and how it is called."""

    module: Any
    kind: Kind
    causal: bool
    x: np.ndarray
    """`[batch, seq, d_model]`, or ids, `[batch, seq]`."""
    other: np.ndarray
    """More of the same, different at every token."""
    width: int
    """The last axis of the output."""
    call: Callable[..., Any]
    """`call(module, x, lengths, key) -> y`, of whole sequences."""
    init_cache: Callable[..., Any] | None = None
    """`init_cache(module, x, capacity) -> cache`. None: the block has no cache."""
    extend: Callable[..., Any] = lambda module, x, cache, start, lengths: (module(x), cache)
    """`extend(module, x, cache, start, lengths) -> (y, cache)`."""
    aux_loss: Callable[..., Any] | None = None
    """`aux_loss(module, x, lengths)`. None: the block has none."""
    zero_grad: Sequence[str] = ()
    separate_documents: bool = False
    """Whether the config of a block says that documents are kept apart."""
    source: np.ndarray | None = None
    """Ids, `[seq]`: of an encoder-decoder, the source of all sequences."""
    sees: Sees | None = None
    """What the output must depend on. None: not known."""
    longest: int = max(FAR)
    """Tokens of the longest sequence that the block is made for."""
    rebuilt: Callable[..., Any] = lambda **changes: None
    """The block, built with other fields of the config (`dropout=0.1`), from another `seed`, as
    another `layer`, or not `moved`; None of a module, which is built already."""
    reference: Callable[..., Any] | None = None
    """`reference(**changes)`: another form of what `rebuilt(**changes)` gives, with the same
    parameters. None: there is none."""
    notes: dict[str, str] = field(default_factory=dict)
    """What a law could not look at, by the law."""
    _programs: dict[Any, Callable[..., Any]] = field(default_factory=dict)

    @property
    def seq(self) -> int:
        """Tokens in a sequence."""
        return self.x.shape[1]

    @property
    def has_floats(self) -> bool:
        """Whether the input is `[..., d_model]`, and not ids."""
        return self.x.dtype == np.float32

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, compiled; arguments that are no arrays are static. Its programs go when the
        subject goes. (Those of `eqx.filter_jit` stay, and a process may have 65,530 maps of
        memory.)"""
        if function not in self._programs:
            self._programs[function] = _compiled(function)
        return self._programs[function]

    def run(self, x: Any, lengths: Any = None, key: Any = None, module: Any = None) -> np.ndarray:
        """The output for whole sequences, compiled."""
        module = self.module if module is None else module
        return np.asarray(self.compiled(self.call)(module, x, lengths, key))

    def pull(
        self, x: Any, cotangent: np.ndarray, lengths: Any = None, module: Any = None
    ) -> tuple[np.ndarray, Any, Any]:
        """The output, and the gradients of `vdot(cotangent, output)` by the parameters and by the
        input (None for ids), compiled."""
        module = self.module if module is None else module
        out = self.compiled(self._pull)(module, x, lengths, cotangent)
        return jax.tree.map(np.asarray, out)

    def forget(self) -> None:
        """Drop all programs."""
        self._programs.clear()

    @functools.cached_property
    def _pull(self) -> Callable[..., Any]:
        def pull(module, x, lengths, cotangent):
            params, static = eqx.partition(module, eqx.is_inexact_array)

            def call(params, inputs):
                given = inputs if self.has_floats else x
                return self.call(eqx.combine(params, static), given, lengths, None)

            y, back = jax.vjp(call, params, x if self.has_floats else None)
            return y, *back(cotangent.astype(y.dtype))

        return pull


@functools.cache
def _quick_options() -> dict[str, Any]:
    """Options of XLA that halve the time to compile, for programs that run a few times:
    those that its version knows."""
    known = {}
    for name, value in QUICK.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda: 0, compiler_options={name: value})()
            known[name] = value
    return known


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(structure, static, arrays):
        pairs = zip(static, arrays, strict=True)
        leaves = [x if array is None else array for x, array in pairs]
        return function(*jax.tree.unflatten(structure, leaves))

    jitted = jax.jit(run, static_argnums=(0, 1), compiler_options=_quick_options())

    def call(*arguments):
        leaves, structure = jax.tree.flatten(arguments)
        is_array = [isinstance(x, jax.Array | np.ndarray | np.generic) for x in leaves]
        static = (None if array else x for x, array in zip(leaves, is_array, strict=True))
        arrays = [x if array else None for x, array in zip(leaves, is_array, strict=True)]
        return jitted(structure, tuple(static), arrays)

    return call


def make_subject(
    block: Any,
    kind: Kind | None,
    d_model: int | None,
    causal: bool | None,
    seq: int,
    seed: int,
) -> Subject:
    """**Raises:** `UserError` if the block is too small to be checked, or `d_model` is missing."""
    kind = _kind_of(block) if kind is None else kind
    if causal is None:
        not_causal = any(getattr(module, "causal", True) is False for module in modules_in(block))
        causal = kind == "encoder-decoder" or not not_causal
    parts: dict[str, Any] = {
        "module": block,
        "kind": kind,
        "causal": causal,
    }
    random = np.random.default_rng(seed)
    if kind in ("layer", "block"):
        if d_model is None:
            raise UserError(f"d_model must be given to check the {kind}.")
        require(seq >= 4, f"seq must be at least 4, got {seq}.")
        x, other = random.normal(size=(2, BATCH, seq, d_model)).astype(np.float32)
        parts |= {"x": x, "other": other, "width": d_model}
        if kind == "layer":
            has_loss = hasattr(block, "aux_loss")
            aux_loss = (lambda layer, x, lengths: layer.aux_loss(x, lengths)) if has_loss else None
            parts |= {"init_cache": lambda module, x, capacity: (), "aux_loss": aux_loss}
            return Subject(**parts, call=_call_layer)
        calls = {"call": _call_block, "init_cache": _block_cache, "extend": _extend_block}
        return Subject(**parts, **calls, aux_loss=_aux_loss_of_block)

    vocab = _vocab_size(block, kind)
    context_length = getattr(getattr(block, "config", None), "context_length", seq + 2)
    seq = min(seq, context_length - 2)
    require(
        seq >= 4 and vocab >= 4,
        f"it is too small to be checked, with a vocabulary of {vocab} and a context of "
        f"{context_length}: at least 4 and 6 are needed.",
    )
    x = random.integers(vocab, size=(BATCH, seq)).astype(np.int32)
    separator = getattr(block, "separator", None)
    if separator is not None:
        x[:, seq // 3] = separator
    other = (x + random.integers(1, vocab, size=x.shape).astype(np.int32)) % vocab
    parts |= {"x": x, "other": other, "width": vocab}
    if kind == "encoder":
        return Subject(**(parts | {"width": block.config.d_model}), call=_call_model)
    if kind == "encoder-decoder":
        parts |= {"width": block.decoder.vocab_size, "source": x[0]} | calls_of_targets(x[0])
        return Subject(**parts)
    if hasattr(block, "extend"):
        calls = {"call": _call_model, "init_cache": _model_cache, "extend": _extend_model}
        return Subject(**parts, **calls)
    return Subject(**parts, call=_call_layer)


def _kind_of(block: Any) -> Kind:
    if isinstance(block, Encoder):
        return "encoder"
    if isinstance(block, Seq2Seq):
        return "encoder-decoder"
    if hasattr(block, "vocab_size"):
        return "model"
    return "block" if hasattr(block, "init_cache") else "layer"


# How each kind is called.


def _call_layer(layer: Any, x: Any, lengths: Any, key: Any) -> Any:
    return layer(x)


def _call_block(block: Any, x: Any, lengths: Any, key: Any) -> Any:
    return _out_of_block(block, x, lengths, key)[0]


def _out_of_block(block: Any, x: Any, lengths: Any, key: Any) -> tuple[Any, ...]:
    out = block(x, None, Context(lengths=lengths), key=key)
    require(
        isinstance(out, tuple) and len(out) in (2, 3),
        f"{type(block).__name__} must return (y, cache), as attention, or (y, cache, aux_loss), as "
        "a whole block.",
    )
    return out


def _aux_loss_of_block(block: Any, x: Any, lengths: Any) -> Any:
    return (*block(x, None, Context(lengths=lengths), key=None), 0.0)[2]


def _block_cache(block: Any, x: Any, capacity: int) -> Any:
    require(
        hasattr(block, "init_cache"),
        f"{type(block).__name__} has no method init_cache(batch, capacity, dtype), which decoding "
        "needs.",
    )
    # A whole block is also given the context, which holds an encoder's output.
    is_whole = len(eqx.filter_eval_shape(_out_of_block, block, x, None, None)) == 3
    more = (WHOLE_SEQUENCE,) if is_whole else ()
    try:
        inspect.signature(block.init_cache).bind(x.shape[:-2], capacity, x.dtype, *more)
    except TypeError as error:
        takes = "(batch, capacity, dtype, context)" if is_whole else "(batch, capacity, dtype)"
        name = f"{type(block).__name__}.init_cache"
        raise UserError(f"{name} must take {takes}: {error}.") from error
    return block.init_cache(x.shape[:-2], capacity, x.dtype, *more)


def _extend_block(block: Any, x: Any, cache: Any, start: Any, lengths: Any) -> Any:
    return block(x, cache, Context(start=start, lengths=lengths), key=None)[:2]


def _call_model(model: Any, ids: Any, lengths: Any, key: Any) -> Any:
    return model(ids, lengths=lengths, key=key)


def _model_cache(model: Any, ids: Any, capacity: int) -> Any:
    return model.init_cache(ids.shape[:-1])


def _extend_model(model: Any, ids: Any, cache: Any, start: Any, lengths: Any) -> Any:
    # `start` is in the cache, as the length.
    cache = eqx.tree_at(lambda cache: cache.length, cache, start.astype(jnp.int32))
    hidden, cache = model.extend(ids, cache, lengths)
    return model.logits(hidden), cache


def calls_of_targets(source: Any, source_lengths: Any = None) -> dict[str, Callable[..., Any]]:
    """An encoder-decoder, called as a model of its targets."""

    def sources_of(batch):
        lengths = source_lengths
        lengths = None if lengths is None else jnp.broadcast_to(lengths, batch)
        return jnp.broadcast_to(source, (*batch, len(source))), lengths

    def call(model, ids, lengths, key):
        sources, source_lengths = sources_of(ids.shape[:-1])
        return model(sources, ids, source_lengths=source_lengths, lengths=lengths, key=key)

    def extend(model, ids, cache, start, lengths):
        return _extend_model(model.decoder, ids, cache, start, lengths)

    def init_cache(model, x, capacity):
        return model.init_cache(*sources_of(x.shape[:-1]))

    return {"call": call, "init_cache": init_cache, "extend": extend}


def _vocab_size(model: Any, kind: Kind) -> int:
    if kind == "encoder":
        return len(model.embedding.weight)
    if kind == "encoder-decoder":
        source = model.decoder if model.shares_embedding else model.encoder
        return min(len(source.embedding.weight), model.decoder.vocab_size)
    out = eqx.filter_eval_shape(model, jnp.zeros((1, 1), jnp.int32))
    require(
        out.ndim == 3,
        f"it cannot be checked: it makes {list(out.shape)} of ids of the shape [1, 1], and not "
        "logits for each of them. (Check its parts.)",
    )
    return out.shape[-1]


def modules_in(tree: Any) -> Iterator[Any]:
    """All modules in `tree`."""
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, eqx.Module)):
        if isinstance(node, eqx.Module):
            yield node
            for field in dataclasses.fields(node):
                if not field.metadata.get("static", False):
                    yield from modules_in(getattr(node, field.name, None))
