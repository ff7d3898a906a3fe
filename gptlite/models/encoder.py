"""The encoder: contextual embeddings."""

import functools

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from gptlite.config import ModelConfig
from gptlite.models.parts import make_block
from gptlite.models.transformer import Transformer


class Encoder(Transformer):
    """A stack of blocks in which every token sees every other (Vaswani et al., 2017, section 3.1;
    by itself: Devlin et al., 2019, "BERT").

    From ids to one vector a token, which knows of all the others. `config.block`'s post-norm has no
    final norm, as in the paper.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, *, key: PRNGKeyArray):
        """`vocab_size`: ids, those of tokens that only mask included.

        **Raises:** `UserError` if `config` describes a part that cannot look both ways.
        """
        super().__init__(
            config,
            vocab_size,
            functools.partial(make_block, causal=False),
            final_norm=config.block != "post",
            key=key,
        )

    def __call__(
        self,
        ids: Int[Array, "*batch seq"],
        *,
        padding_mask: Bool[Array, "*batch seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*batch seq d_model"]:
        """`padding_mask` is False where there is no token, before or after a sequence's own, which
        get what they would without such places; what comes out there means nothing. `key` switches
        dropout on."""
        return self._read(ids, padding_mask, key)
