"""Attention by kernels that keep the scores on the chip: cuDNN's on NVIDIA's GPUs, and the splash
attention kernel that comes with JAX on TPUs."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gptlite.sharding import is_seeds_mesh, map_heads, targets_nvidia, targets_tpu

Heads = Float[Array, "*batch heads seq d_head"]
KVHeads = Float[Array, "*batch kv_heads seq d_head"]

# Queries, and keys, that a TPU multiplies at a time: the largest that divides the sequence.
# https://github.com/AI-Hypercomputer/maxtext takes 512 by default.
SPLASH_BLOCKS = (512, 256, 128)


def fused_attention(
    query: Heads, key: Array, value: Array, *, is_causal: bool, window: int | None
) -> Heads | None:
    """Attention of whole sequences to themselves (see `attend`). None if the devices of the mesh
    have no kernel for such arrays."""
    seq, d_head = query.shape[-2:]
    if seq != key.shape[-2] or key.shape != value.shape:
        return None
    # Not by `lax.platform_dependent`: to trace cuDNN's attention, cuDNN must be installed.
    if targets_nvidia():
        half = query.dtype in (jnp.float16, jnp.bfloat16)
        fits = half and d_head % 8 == 0 and d_head <= 128
        return _cudnn(query, key, value, is_causal, window) if fits else None
    fits = query.dtype == jnp.bfloat16 and seq % SPLASH_BLOCKS[-1] == 0
    # (The compiler does not divide the kernel over seeds, nor can `map_heads`, which is inside of
    # the `vmap` over them.)
    if targets_tpu() and fits and not is_seeds_mesh():
        return _splash(query, key, value, is_causal, window)
    return None


def _cudnn(
    query: Heads, key: KVHeads, value: KVHeads, is_causal: bool, window: int | None
) -> Heads:
    def seq_first(x):  # [batch, seq, heads, d_head]
        return jnp.swapaxes(x.reshape(-1, *x.shape[-3:]), 1, 2)

    out = jax.nn.dot_product_attention(
        seq_first(query),
        seq_first(key),
        seq_first(value),
        is_causal=is_causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return jnp.swapaxes(out, 1, 2).reshape(query.shape)


def _splash(
    query: Heads, key: KVHeads, value: KVHeads, is_causal: bool, window: int | None
) -> Heads:
    # Imported here: only TPUs need it, and it takes a while.
    from jax.experimental.pallas.ops.tpu import splash_attention

    seq, d_head = query.shape[-2:]
    block = next(size for size in SPLASH_BLOCKS if seq % size == 0)
    blocks = splash_attention.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    # `gptlite.estimate.program` knows the kernels by these names.
    if window is not None:
        mask = splash_attention.LocalMask((seq, seq), (window - 1, 0), offset=0)
        name = f"splash_window{window}"
    elif is_causal:
        mask, name = splash_attention.CausalMask((seq, seq)), "splash_causal"
    else:
        mask, name = splash_attention.FullMask((seq, seq)), "splash"

    def on_device(query, key, value):
        masks = splash_attention.MultiHeadMask([mask] * query.shape[1])
        kernel = splash_attention.make_splash_mha_single_device(masks, block_sizes=blocks)
        return jax.vmap(kernel)(query, key, value)

    # The kernel does not scale.
    scaled = query * jnp.asarray(1 / math.sqrt(d_head), query.dtype)
    with jax.named_scope(name):
        out = map_heads(on_device, *(x.reshape(-1, *x.shape[-3:]) for x in (scaled, key, value)))
    return out.reshape(query.shape)
