"""The attention weights inside a model."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
from jaxtyping import Array, Float

from gptlite.errors import require
from gptlite.family.seq2seq import Seq2Seq
from gptlite.inspect.hooks import with_call_hook
from gptlite.machine.ids import check_ids
from gptlite.models.transformer import Transformer
from gptlite.nn.stack import unstacked

M = TypeVar("M", bound=eqx.Module)


def attention_maps(
    model: Callable[..., Any], *arguments: Any, **options: Any
) -> dict[str, Float[Array, "*batch heads queries keys"]]:
    """The attention weights of all layers in `model(*arguments, **options)`, in the order of their
    calls, by their path in the model, e.g. `stack.blocks.0.attention`.

    Every module with a method `weights` has one: `Attention`, `CrossAttention`, or your own. The
    method is called with the arguments of the module.

    **Raises:** `UserError` if an id is not in the vocabulary, or such a method returns another
    shape than that of attention weights.
    """
    parts: list[tuple[Transformer, str]] = []
    if isinstance(model, Transformer):
        parts = [(model, "lengths")]
    elif isinstance(model, Seq2Seq):  # each of its arguments has a vocabulary of its own
        parts = [(model.encoder, "source_lengths"), (model.decoder, "lengths")]
    for (part, name), ids in zip(parts, arguments, strict=False):
        check_ids(ids, part.vocab_size, options.get(name))
    # Layers that share a module would share its name.
    return dict(_attention_maps(unstacked(model), arguments, options))


@eqx.filter_jit
def _attention_maps(
    model: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> list[tuple[str, Array]]:
    maps: dict[str, Array] = {}

    def on_call(name, module, inputs, others, out):
        weights = maps[name] = module.weights(*inputs, **others)
        x = inputs[0]
        require(
            weights.shape[:-3] == x.shape[:-2] and weights.shape[-2] == x.shape[-2],
            f"{name}.weights must return [*batch, heads, seq, keys] for inputs of "
            f"{list(x.shape)}, got {list(weights.shape)}.",
        )

    with_call_hook(model, _has_weights, on_call)(*arguments, **options)
    return list(maps.items())  # JAX would sort a dictionary: layer 10 before layer 2


def _has_weights(node: Any) -> bool:
    return isinstance(node, eqx.Module) and callable(getattr(type(node), "weights", None))
