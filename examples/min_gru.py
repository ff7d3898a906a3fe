"""A recurrence of your own: minGRU (Feng et al., 2024, "Were RNNs all we needed?", section 3.1).

    gptlite check-block examples/min_gru.py:MinGRU
    gptlite train --model.attention examples/min_gru.py:MinGRU

Each channel is a mean of candidates, of which a gate that depends on the token says how much the
new one counts. All else (training, generation from a cache, prompts of different lengths, documents
that are kept apart) follows from the step of one token.
"""

import jax
import jax.numpy as jnp

from gptlite.nn import Linear, Recurrence


class MinGRU(Recurrence):
    """`state = (1 - gate) ⊙ state + gate ⊙ candidate`."""

    gate: Linear
    candidate: Linear

    def __init__(self, config, *, key):
        gate_key, key = jax.random.split(key)
        d, std = config.d_model, config.d_model**-0.5
        self.gate = Linear(d, d, std=std, bias=True, key=gate_key)
        self.candidate = Linear(d, d, std=std, key=key)

    def init_state(self):
        """Before the first token."""
        return jnp.zeros(len(self.candidate.weight))

    def before(self, x):
        """The products with matrices, for all tokens at once."""
        return jax.nn.sigmoid(self.gate(x)), self.candidate(x)

    def step(self, state, x):
        """The next state, and the output."""
        gate, candidate = x
        state = (1 - gate) * state + gate * candidate
        return state, state
