"""The laws of blocks, which `check_block` runs in this order. Each returns a message if a block
breaks it, and raises `NotApplicableError` if it says nothing about the block. The first line of its
docstring is what it says: see `sentence`."""

from collections.abc import Callable

from gptlite.research.laws import agreement, form, gradients, numbers, order, training, transfer
from gptlite.research.subject import Subject

LAWS: dict[str, Callable[[Subject], str | None]] = {
    "parameters": form.check_parameters,
    "shapes": form.check_shapes,
    "memory": form.check_memory,
    "build": form.check_build,
    "jit": form.check_jit,
    "causal": order.check_causal,
    "backward": order.check_backward,
    "bidirectional": order.check_bidirectional,
    "sees": order.check_sees,
    "batch": agreement.check_batch,
    "cached": agreement.check_cached,
    "padding": agreement.check_padding,
    "lengths": numbers.check_lengths,
    "documents": order.check_documents,
    "gradients": gradients.check_gradients,
    "bfloat16": numbers.check_bfloat16,
    "extremes": numbers.check_extremes,
    "dropout": training.check_dropout,
    "auxiliary": training.check_auxiliary,
    "weights": agreement.check_weights,
    "scan": agreement.check_scan,
    "transfer": transfer.check_transfer,
    "reference": agreement.check_reference,
}


def sentence(name: str) -> str:
    """What the law of that name says, without a full stop."""
    return (LAWS[name].__doc__ or "").partition("\n")[0].removesuffix(".")
