"""The logit lens: the prediction of each layer if it were the last."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from gptlite.inspect.hooks import with_call_hook
from gptlite.models.gpt import GPT
from gptlite.models.transformer import Ids
from gptlite.nn.stack import unstacked


def residual_stream(model: GPT, ids: Ids) -> Float[Array, "layers *batch seq d_model"]:
    """The input of the first layer, and the output of every layer: `n_layers + 1` of them."""
    model = unstacked(model)
    blocks = model.stack.blocks
    stream: list[Array] = []

    def on_call(name, block, inputs, options, out):
        if not stream:
            stream.append(inputs[0])
        stream.append(out[0])

    with_call_hook(model, lambda node: any(node is block for block in blocks), on_call)(ids)
    return jnp.stack(stream)


def logit_lens(model: GPT, ids: Ids) -> Float[Array, "layers *batch seq vocab"]:
    """The next token's logits from the input of the first layer, and from the output of every
    layer, as the model's final norm and head make them: the last are the model's own
    (nostalgebraist, 2020, "interpreting GPT: the logit lens"). The arguments are those of
    `model(ids)`.

    **Raises:** `UserError` as `model(ids)` does.
    """
    return model.logits(model.norm(residual_stream(model, ids)))
