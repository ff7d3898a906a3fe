"""The encoder: contextual embeddings."""

import functools

from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.config import ModelConfig
from gptlite.errors import require
from gptlite.machine.fields import Count, check_value
from gptlite.models.build import make_block
from gptlite.models.transformer import Ids, Transformer
from gptlite.nn.context import Context, PerSequence


class Encoder(Transformer):
    """A stack of blocks in which every token sees every other (Vaswani et al., 2017, section 3.1;
    by itself: Devlin et al., 2019, "BERT").

    From ids to one vector for each token, which depends on all tokens. With post-norm blocks there
    is no final norm, as in the paper.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, *, key: PRNGKeyArray):
        """`vocab_size` includes ids such as a mask. Parameters are drawn with `key`.

        **Raises:** `UserError` if `config` describes a part that is only for decoders, or
        `vocab_size` is out of range.
        """
        require(
            not config.separate_documents,
            "An encoder sees all tokens of its input: leave separate_documents out.",
        )
        super().__init__(
            config,
            check_value("vocab_size", vocab_size, Count),
            functools.partial(make_block, causal=False),
            final_norm=config.block != "post",
            key=key,
        )

    def __call__(
        self,
        ids: Ids,
        *,
        lengths: PerSequence | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*batch seq d_model"]:
        """The first `lengths` ids of a sequence are real (default: all). Padding follows them, and
        does not change their vectors. `key` switches dropout on.

        **Raises:** `UserError` as `hidden` does.
        """
        return self.hidden(ids, Context(lengths=lengths), key=key)[0]
