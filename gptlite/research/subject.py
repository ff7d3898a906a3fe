"""The subject of the checks: a block, its inputs, and how it is called."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gptlite.errors import UserError, require
from gptlite.family.encoder import Encoder
from gptlite.family.seq2seq import Seq2Seq
from gptlite.nn.context import Context

BATCH = 3

Kind = Literal["layer", "block", "model", "encoder", "encoder-decoder"]


@dataclass(frozen=True, eq=False)
class Subject:
    """A block, its inputs, and how it is called."""

    module: Any
    kind: Kind
    causal: bool
    zero_grad: Sequence[str]
    x: np.ndarray
    """`[batch, seq, d_model]`, or ids, `[batch, seq]`."""
    other: np.ndarray
    """More of the same, different at every token."""
    width: int
    """The last axis of the output."""
    call: Callable[..., Any]
    """`call(module, x, lengths, key) -> y`, of whole sequences."""
    init_cache: Callable[..., Any] | None = None
    """`init_cache(module, x) -> cache`. None: the block has no cache."""
    extend: Callable[..., Any] = lambda module, x, cache, start, lengths: (module(x), cache)
    """`extend(module, x, cache, start, lengths) -> (y, cache)`."""
    source: np.ndarray | None = None
    """Ids, `[seq]`: of an encoder-decoder, the source of all sequences."""

    @property
    def seq(self) -> int:
        """Tokens in a sequence."""
        return self.x.shape[1]

    def run(self, x: Any, lengths: Any = None, key: Any = None, module: Any = None) -> np.ndarray:
        """The output for whole sequences, compiled."""
        return run_compiled(self.call, self.module if module is None else module, x, lengths, key)


def make_subject(
    block: Any,
    kind: Kind | None,
    d_model: int | None,
    causal: bool | None,
    seq: int,
    zero_grad: Sequence[str],
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
        "zero_grad": zero_grad,
    }
    random = np.random.default_rng(seed)
    if kind in ("layer", "block"):
        if d_model is None:
            raise UserError(f"d_model must be given to check the {kind}.")
        require(seq >= 4, f"seq must be at least 4, got {seq}.")
        x, other = random.normal(size=(2, BATCH, seq, d_model)).astype(np.float32)
        parts |= {"x": x, "other": other, "width": d_model}
        if kind == "layer":
            return Subject(**parts, call=_call_layer, init_cache=lambda module, x: ())
        return Subject(**parts, call=_call_block, init_cache=_block_cache, extend=_extend_block)

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
    out = block(x, None, Context(lengths=lengths), key=key)
    require(
        isinstance(out, tuple) and len(out) in (2, 3),
        f"{type(block).__name__} must return (y, cache), as attention, or (y, cache, aux_loss), as "
        "a whole block.",
    )
    return out[0]


def _block_cache(block: Any, x: Any) -> Any:
    # With more room than is ever read.
    return block.init_cache(x.shape[:-2], x.shape[-2] + 3, x.dtype)


def _extend_block(block: Any, x: Any, cache: Any, start: Any, lengths: Any) -> Any:
    return block(x, cache, Context(start=start, lengths=lengths), key=None)[:2]


def _call_model(model: Any, ids: Any, lengths: Any, key: Any) -> Any:
    return model(ids, lengths=lengths, key=key)


def _model_cache(model: Any, ids: Any) -> Any:
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

    def init_cache(model, x):
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


@eqx.filter_jit
def call_jitted(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def run_compiled(function: Callable[..., Any], *arguments: Any) -> np.ndarray:
    """`function(*arguments)`, compiled."""
    return np.asarray(call_jitted(function, *arguments))
