"""The encoder-decoder."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from gptlite.config import ModelConfig
from gptlite.family.cross_attention import make_decoder_block
from gptlite.family.encoder import Encoder
from gptlite.models.gpt import GPT
from gptlite.models.transformer import Ids
from gptlite.nn.block import split_key
from gptlite.nn.cache import Cache
from gptlite.nn.context import Context, PerSequence


class Seq2Seq(eqx.Module):
    """An encoder that reads the source, and a decoder that writes the target. Each layer of the
    decoder also attends to the encoder's output (Vaswani et al., 2017, section 3).

    `config` is for both, with `n_layers` each. The paper's is `gptlite.family.presets.VASWANI`.
    """

    encoder: Encoder
    decoder: GPT

    def __init__(
        self,
        config: ModelConfig,
        source_vocab_size: int,
        target_vocab_size: int,
        *,
        share_embedding: bool = False,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `source_vocab_size`, `target_vocab_size`: how many ids there are on each side.
        - `share_embedding`: one table for source and target (and with `config.tied_head` the head,
          as in the paper's section 3.4), whose vocabularies are then the same.
        - `key`: parameters are drawn with it.

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
        # The same array in two places of a pytree would be trained as two.
        self.encoder = (
            eqx.tree_at(lambda e: e.embedding, encoder, None) if share_embedding else encoder
        )

    @property
    def config(self) -> ModelConfig:
        """The config of encoder and decoder."""
        return self.decoder.config

    @property
    def shares_embedding(self) -> bool:
        """Whether source and target have one table."""
        return self.encoder.embedding is None

    def __call__(
        self,
        source: Int[Array | np.ndarray, "*batch source_seq"],
        inputs: Ids,
        *,
        source_lengths: PerSequence | None = None,
        lengths: PerSequence | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*batch seq vocab"]:
        """Logits of the target's token after each of `inputs`, which are the target after a start
        token: see `shift_right`.

        The first `source_lengths` ids of a source and the first `lengths` ids of `inputs` are real
        (default: all); padding follows them. `key` switches dropout on.

        **Raises:** `UserError` if there are no ids or more than the context has, or one is not in
        its vocabulary.
        """
        options = {"source_lengths": source_lengths, "lengths": lengths, "key": key}
        return self.with_aux_loss(source, inputs, **options)[0]

    def with_aux_loss(
        self,
        source: Int[Array | np.ndarray, "*batch source_seq"],
        inputs: Ids,
        *,
        source_lengths: PerSequence | None = None,
        lengths: PerSequence | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq vocab"], Float[Array, ""]]:
        """The logits, and what mixtures of experts add to the training loss."""
        encoder_key, decoder_key = split_key(key, 2)
        memory, aux_loss = self._whole_encoder().hidden(
            source, Context(lengths=source_lengths), key=encoder_key
        )
        context = Context(lengths=lengths, memory=memory, memory_lengths=source_lengths)
        logits, decoder_loss = self.decoder.with_aux_loss(inputs, context, key=decoder_key)
        return logits, aux_loss + decoder_loss

    def encode(
        self,
        source: Int[Array | np.ndarray, "*batch source_seq"],
        source_lengths: PerSequence | None = None,
    ) -> Float[Array, "*batch source_seq d_model"]:
        """The encoder's output."""
        return self._whole_encoder()(source, lengths=source_lengths)

    def init_cache(
        self,
        source: Int[Array | np.ndarray, "*batch source_seq"],
        source_lengths: PerSequence | None = None,
    ) -> Cache:
        """A cache for `decoder.extend` that has read `source`, with room for `context_length`
        tokens of the target."""
        context = Context(memory=self.encode(source, source_lengths), memory_lengths=source_lengths)
        return self.decoder.init_cache(source.shape[:-1], context)

    def _whole_encoder(self) -> Encoder:
        if not self.shares_embedding:
            return self.encoder
        return eqx.tree_at(
            lambda e: e.embedding, self.encoder, self.decoder.embedding, is_leaf=lambda x: x is None
        )


def shift_right(targets: Ids, start: int) -> Int[Array, "*batch seq"]:
    """The decoder's inputs for `targets`: a start token, and all targets but the last."""
    targets = jnp.asarray(targets)
    first = jnp.full((*targets.shape[:-1], 1), start, targets.dtype)
    return jnp.concatenate([first, targets[..., :-1]], axis=-1)
