"""Other places of the norms, and of the branches."""

from typing import Any

import equinox as eqx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.nn.block import checked, drop, run_mlp, split_key
from gptlite.nn.context import WHOLE_SEQUENCE, Context


class SandwichNorm(eqx.Module):
    """`x + norm_out(branch(norm(x)))` (Ding et al., 2021, "CogView", section 2.4).

    Loss against pre-norm: +0.038 ± 0.018 nats per token (benchmarks/blocks.md).
    """

    norm: Any
    norm_out: Any

    def before(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """The input of the branch."""
        return self.norm(x)

    def after(self, x: Float[Array, "*batch d"], y: Array) -> Float[Array, "*batch d"]:
        """The residual stream `x` with the branch's output `y`."""
        return x + self.norm_out(y)


class ParallelBlock(eqx.Module):
    """`x + attention(norm(x)) + mlp(norm(x))`, with one norm for both (Wang and Komatsuzaki, 2021,
    "GPT-J"; Chowdhery et al., 2022, "PaLM", section 2). The parts are those of `Block`.

    Loss against pre-norm: +0.017 ± 0.009 nats per token (benchmarks/blocks.md).
    """

    attention: Any
    mlp: Any
    norm: Any
    dropout: float = eqx.field(static=True, default=0.0)

    def init_cache(
        self,
        batch: tuple[int, ...],
        capacity: int,
        dtype: DTypeLike,
        context: Context = WHOLE_SEQUENCE,
    ) -> Any:
        """As `Block.init_cache`."""
        return self.attention.init_cache(batch, capacity, dtype)

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: Any = None,
        context: Context = WHOLE_SEQUENCE,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], Any, Float[Array, ""]]:
        """As `Block`."""
        keys = split_key(key, 3)
        h = self.norm(x)
        out = self.attention(h, cache, context, key=keys[0])
        attended, cache = checked(self.attention, out, h, "y", "cache")
        y, aux_loss = run_mlp(self.mlp, h, context.lengths)
        attended, y = drop(attended, self.dropout, keys[1]), drop(y, self.dropout, keys[2])
        return x + attended + y, cache, aux_loss
