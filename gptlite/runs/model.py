"""The model of a run: of a config, for the ids of a tokenizer."""

import equinox as eqx
import jax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from gptlite.config import ModelConfig
from gptlite.errors import require
from gptlite.machine.names import parse_lora
from gptlite.models.gpt import GPT
from gptlite.sharding import constrain_parameters
from gptlite.text.tokenizer import Tokenizer


def separator_of(config: ModelConfig, tokenizer: Tokenizer) -> int | None:
    """The token that begins a document, if documents are to be separate.

    **Raises:** `UserError` if the tokenizer has none.
    """
    if not config.separate_documents:
        return None
    require(
        bool(tokenizer.end_ids),
        "model.separate_documents needs a tokenizer with an end-of-text token, such as bpe:4096 or "
        f"tiktoken:gpt2, got one without ({type(tokenizer).__name__}).",
    )
    return tokenizer.end_ids[0]


def make_model(config: ModelConfig, tokenizer: Tokenizer, *, key: PRNGKeyArray) -> GPT:
    """A `GPT` as `config` describes it, for the ids of `tokenizer`. Its parameters are drawn with
    `key`.

    **Raises:** `UserError` if there is no part of a name, a custom block has not been loaded (see
    `gptlite.load_custom`), or documents are to be separate and the tokenizer has no end-of-text
    token.
    """
    with jax.enable_x64(False):  # parameters are in float32, also where JAX_ENABLE_X64 is set
        model = GPT(
            config,
            tokenizer.vocab_size,
            padded_vocab_size=tokenizer.padded_vocab_size,
            separator=separator_of(config, tokenizer),
            key=key,
        )
        if config.lora is None:
            return model
        from gptlite.adapters import with_adapters

        return with_adapters(model, parse_lora(config.lora), key=key)


def draw_model(config: ModelConfig, tokenizer: Tokenizer, mesh: Mesh, *, key: PRNGKeyArray) -> GPT:
    """`make_model(config, tokenizer, key=key)`, sharded over the devices of a mesh."""
    # The program runs once. XLA's optimization level 0 halves the time to compile it.
    # (`eqx.filter_jit` passes `compiler_options` to `jax.jit`. Its annotations omit it.)
    draw = eqx.filter_jit(  # pyright: ignore[reportCallIssue]
        lambda key: constrain_parameters(make_model(config, tokenizer, key=key)),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    with jax.set_mesh(mesh):
        return draw(key)


def abstract_model(config: ModelConfig, tokenizer: Tokenizer) -> GPT:
    """`make_model(config, tokenizer)` with the shapes of arrays in place of the arrays. Computes
    nothing.

    **Raises:** `UserError` as `make_model` does.
    """
    return eqx.filter_eval_shape(make_model, config, tokenizer, key=jax.random.key(0))
