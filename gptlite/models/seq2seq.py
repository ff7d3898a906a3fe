"""The encoder-decoder."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from gptlite.config import ModelConfig
from gptlite.models.encoder import Encoder
from gptlite.models.gpt import GPT
from gptlite.models.parts import make_decoder_block
from gptlite.nn.cache import Cache


class Seq2Seq(eqx.Module):
    """An encoder that reads the source, and a decoder that writes the target, each of whose layers
    also looks at what the encoder has made (Vaswani et al., 2017, section 3).

    `config` is for both, `n_layers` each. The paper's model is `config.VASWANI`.
    """

    encoder: Encoder
    decoder: GPT
    shares_embedding: bool = eqx.field(static=True)

    def __init__(
        self,
        config: ModelConfig,
        source_vocab_size: int,
        target_vocab_size: int,
        *,
        share_embedding: bool = False,
        key: PRNGKeyArray,
    ):
        """`share_embedding`: one table for source and target (and with `config.tied_head` the head,
        as in the paper's section 3.4), whose vocabularies are then the same.

        **Raises:** `UserError` if `config` describes a part that does not fit; `ValueError` if
        vocabularies of two sizes are to share.
        """
        if share_embedding and source_vocab_size != target_vocab_size:
            raise ValueError(
                "To share an embedding, both vocabularies must be the same, got "
                f"{source_vocab_size} and {target_vocab_size} tokens."
            )
        encoder_key, decoder_key = jax.random.split(key)
        encoder = Encoder(config, source_vocab_size, key=encoder_key)
        self.decoder = GPT(
            config,
            target_vocab_size,
            make_block=make_decoder_block,
            final_norm=config.block != "post",
            key=decoder_key,
        )
        # What stands in two places of a pytree would be trained as two.
        self.encoder = (
            eqx.tree_at(lambda e: e.embedding, encoder, None) if share_embedding else encoder
        )
        self.shares_embedding = share_embedding

    @property
    def config(self) -> ModelConfig:
        """That of both halves."""
        return self.decoder.config

    def encode(
        self,
        source: Int[Array, "*batch source_seq"],
        *,
        source_mask: Bool[Array, "*batch source_seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*batch source_seq d_model"]:
        """What the decoder looks at. `source_mask` is False where there is no token."""
        encoder = self.encoder
        if self.shares_embedding:
            encoder = eqx.tree_at(
                lambda e: e.embedding, encoder, self.decoder.embedding, is_leaf=lambda x: x is None
            )
        return encoder(source, padding_mask=source_mask, key=key)

    def __call__(
        self,
        source: Int[Array, "*batch source_seq"],
        inputs: Int[Array, "*batch seq"],
        *,
        source_mask: Bool[Array, "*batch source_seq"] | None = None,
        padding_mask: Bool[Array, "*batch seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*batch seq vocab"]:
        """Logits of the target's token after each of `inputs`, which are the target behind a start
        token: see `shift_right`.

        The masks are False where there is no token; `key` switches dropout on.
        """
        encoder_key, decoder_key = (None, None) if key is None else jax.random.split(key)
        memory = self.encode(source, source_mask=source_mask, key=encoder_key)
        return self.decoder(
            inputs,
            padding_mask=padding_mask,
            key=decoder_key,
            memory=memory,
            memory_mask=source_mask,
        )

    def init_cache(
        self,
        source: Int[Array, "*batch source_seq"],
        *,
        source_mask: Bool[Array, "*batch source_seq"] | None = None,
    ) -> Cache:
        """A cache that has read `source`, with room for `context_length` tokens of the target, for
        `decoder.extend`."""
        memory = self.encode(source, source_mask=source_mask)
        return self.decoder.init_cache(source.shape[:-1], memory=memory, memory_mask=source_mask)

    def unstacked(self) -> "Seq2Seq":
        """See `GPT.unstacked`."""
        return eqx.tree_at(lambda model: model.decoder, self, self.decoder.unstacked())


def shift_right(targets: Int[Array, "*batch seq"], start: int) -> Int[Array, "*batch seq"]:
    """What the decoder reads while it learns `targets`: a start token, and all but the last."""
    first = jnp.full((*targets.shape[:-1], 1), start, targets.dtype)
    return jnp.concatenate([first, targets[..., :-1]], axis=-1)
