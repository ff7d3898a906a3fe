"""Attention with a recurrent state, as an example of a block of your own.

    gptlite train --model.attention examples/gated_linear_attention.py:GatedLinearAttention
    gptlite check-block examples/gated_linear_attention.py:GatedLinearAttention

Each head keeps one matrix of the past, `S_t = g_t S_{t-1} + k_t v_tᵀ`, and reads it with its query,
`y_t = S_tᵀ q_t`. The gate g_t, between 0 and 1, depends on the token (Yang et al., 2024, "Gated
linear attention transformers"; here with one gate a head, as in Dao and Gu, 2024, "Mamba-2"). So
generation needs no key/value cache, and a token costs the same however long the text is. It does
not read `context.document_starts`: with `--model.separate-documents`, it would mix documents.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

from gptlite.nn import WHOLE_SEQUENCE, Heads, Linear, RMSNorm
from gptlite.nn.dtypes import widen


class GatedLinearAttention(eqx.Module):
    """Gated linear attention, with the call of `gptlite.nn.Attention`."""

    heads: Heads
    gate: Linear
    norm: RMSNorm

    def __init__(self, config, *, key):
        heads_key, gate_key = jax.random.split(key)
        d_model, n_heads, std = config.d_model, config.n_heads, config.d_model**-0.5
        self.heads = Heads(d_model, n_heads, std=std, output_std=0.0, key=heads_key)
        self.gate = Linear(d_model, n_heads, std=std, key=gate_key)
        self.norm = RMSNorm(self.heads.d_head)

    def init_cache(self, batch, capacity, dtype):
        """The state before the first token: a float32 matrix per head, for any capacity."""
        d_head, d_model = self.heads.d_head, self.heads.query.weight.shape[-1]
        return jnp.zeros((*batch, d_model // d_head, d_head, d_head))

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        q, k, v = (self.heads.split(y) for y in self.heads.qkv(x, fused=cache is None))
        q, k, v = widen(q) / self.heads.d_head**0.5, widen(k), widen(v)
        # Gates begin near 0.98: a memory of some 50 tokens.
        log_gate = jnp.swapaxes(jax.nn.log_sigmoid(widen(self.gate(x)) + 4), -1, -2)
        if context.lengths is not None:  # padding leaves the state as it is
            real = (jnp.arange(x.shape[-2]) < context.lengths[..., None])[..., None, :]
            log_gate, k = jnp.where(real, log_gate, 0), jnp.where(real[..., None], k, 0)
        # All tokens in parallel: token i reads token j <= i decayed by the gates j + 1 to i, and
        # the incoming state decayed by the gates 0 to i. For a single token this is the recurrence.
        total = jnp.cumsum(log_gate, axis=-1)
        decay = total[..., :, None] - total[..., None, :]
        causal = jnp.tril(jnp.ones(decay.shape[-2:], bool))
        decay = jnp.exp(jnp.where(causal, decay, -jnp.inf))
        y = (q @ jnp.swapaxes(k, -1, -2) * decay) @ v
        if cache is not None:
            y = y + jnp.exp(total)[..., None] * (q @ cache)
            k = k * jnp.exp(total[..., -1:] - total)[..., None]  # decayed to the last token
            cache = jnp.exp(total[..., -1:])[..., None] * cache + jnp.swapaxes(k, -1, -2) @ v
        return self.heads.join(self.norm(y).astype(x.dtype)), cache
