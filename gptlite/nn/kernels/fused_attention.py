"""Attention by kernels that keep the scores on the chip: cuDNN's on NVIDIA's GPUs, and the splash
attention kernel that comes with JAX on TPUs. The reference: `attend` without them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gptlite.nn.kernels.rows import map_heads
from gptlite.sharding import AXES, is_mesh_set, targets_nvidia, targets_tpu

Heads = Float[Array, "*batch heads seq d_head"]
KVHeads = Float[Array, "*batch kv_heads seq d_head"]

# Queries, and keys, that a TPU multiplies at a time: the largest that divides the sequence.
# https://github.com/AI-Hypercomputer/maxtext takes 512 by default.
SPLASH_BLOCKS = (512, 256, 128)


def fused_attention(
    query: Heads,
    key: Float[Array, "*batch kv_heads keys d_head"],
    value: Float[Array, "*batch kv_heads keys d_value"],
    reference: Callable[..., Array],
    *,
    is_causal: bool,
    window: int | None,
    starts: Int[Array, "*batch seq"] | None = None,
) -> Float[Array, "*batch heads seq d_value"]:
    """Attention of whole sequences to themselves (see `attend`), by a kernel of the devices; by the
    `reference`, if they have none for such arrays."""
    kernel = _kernel(query, key, value, starts is not None)
    if kernel is None:
        return reference(query, key, value)
    platform, compute = kernel

    def fused(query, key, value):
        return compute(query, key, value, is_causal, window, starts)

    if is_mesh_set():
        return fused(query, key, value)
    # The arrays may be elsewhere than on JAX's default device.
    by_platform: Any = {platform: fused}
    return lax.platform_dependent(query, key, value, default=reference, **by_platform)


def _kernel(
    query: Heads, key: Array, value: Array, has_starts: bool
) -> tuple[str, Callable[..., Heads]] | None:
    """The kernel for such arrays, after the platform that has it, as JAX calls it."""
    seq, d_head = query.shape[-2:]
    if seq != key.shape[-2] or key.shape != value.shape:
        return None
    # Not by `lax.platform_dependent` alone: to trace cuDNN's attention, cuDNN must be installed.
    if targets_nvidia():
        half = query.dtype in (jnp.float16, jnp.bfloat16)
        # (The gradient needs an even length. JAX does not map a mask over models.)
        fits = half and d_head % 8 == 0 and d_head <= 128 and seq % 2 == 0
        fits = fits and not (has_starts and _n_other_devices())
        return ("cuda", _cudnn) if fits else None
    fits = query.dtype == jnp.bfloat16 and seq % SPLASH_BLOCKS[-1] == 0
    # (The compiler does not divide the kernel over models, nor can `map_heads`, which is inside of
    # the `vmap` over them.)
    if targets_tpu() and fits and _n_other_devices() <= 1:
        return "tpu", _splash
    return None


def _cudnn(
    query: Heads,
    key: KVHeads,
    value: KVHeads,
    is_causal: bool,
    window: int | None,
    starts: Int[Array, "*batch seq"] | None,
) -> Heads:
    def seq_first(x):  # [batch, seq, heads, d_head]
        return jnp.swapaxes(x.reshape(-1, *x.shape[-3:]), 1, 2)

    mask = None
    if starts is not None:
        seq = starts.shape[-1]
        mask = jnp.arange(seq) >= starts.reshape(-1, 1, seq, 1)
    out = jax.nn.dot_product_attention(
        seq_first(query),
        seq_first(key),
        seq_first(value),
        mask=mask,
        is_causal=is_causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return jnp.swapaxes(out, 1, 2).reshape(query.shape)


def _splash(
    query: Heads,
    key: KVHeads,
    value: KVHeads,
    is_causal: bool,
    window: int | None,
    starts: Int[Array, "*batch seq"] | None,
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

    def on_device(query, key, value, *starts):
        masks = splash_attention.MultiHeadMask([mask] * query.shape[1])
        kernel = splash_attention.make_splash_mha_single_device(masks, block_sizes=blocks)
        # Tokens of one document have the same start.
        documents = [splash_attention.SegmentIds(q=ids[:, 0], kv=ids[:, 0]) for ids in starts]
        return jax.vmap(kernel)(query, key, value, *documents)

    # The kernel does not scale.
    scaled = query * jnp.asarray(1 / math.sqrt(d_head), query.dtype)
    arrays = [x.reshape(-1, *x.shape[-3:]) for x in (scaled, key, value)]
    if starts is not None:
        arrays.append(starts.reshape(-1, 1, seq))  # one for all heads
    with jax.named_scope(name):
        out = map_heads(on_device, *arrays)
    return out.reshape(query.shape)


def _n_other_devices() -> int:
    """The devices along an axis of the mesh that is none of ours, where each has models of its own
    (see research/seeds.py); 0 without such an axis."""
    others = [n for axis, n in jax.sharding.get_abstract_mesh().shape.items() if axis not in AXES]
    return math.prod(others) if others else 0
