"""How the scripts configure JAX."""

import contextlib
import dataclasses
import math
import os
import warnings
from pathlib import Path
from typing import Any

from gptlite.config import Config, MeshConfig, TrainingConfig
from gptlite.errors import told
from gptlite.machine.folders import cache_folder

# Where Linux describes the processor.
CPUINFO = Path("/proc/cpuinfo")
# Devices that are made of a CPU: each takes threads and memory.
MIN_DEVICES, MAX_PER_CORE = 16, 8


def set_up_jax(cpu_devices: int = 1) -> None:
    """Keep compiled programs in the user's cache folder, so that later starts load them,
    and make `cpu_devices` devices of the CPU, with threads enough. Once JAX has computed, the
    devices stay those that there are.

    JAX's own environment variables, such as JAX_COMPILATION_CACHE_DIR and JAX_NUM_CPU_DEVICES, take
    precedence, with two exceptions: those for number formats and random numbers, such as
    JAX_ENABLE_X64, which a config sets, and those that forbid what every run does, such as to move
    an array to a device.

    **Raises:** `UserError` if JAX finds no device.
    """
    import jax

    jax.config.update("jax_enable_x64", False)
    jax.config.update("jax_default_prng_impl", "threefry2x32")
    jax.config.update("jax_threefry_partitionable", True)
    jax.config.update("jax_random_seed_offset", 0)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    for kind in ("nan", "divide", "oob"):  # Equinox has checks of its own
        jax.config.update(f"jax_error_checking_behavior_{kind}", "ignore")
    guard = jax.config.jax_transfer_guard  # pyright: ignore[reportAttributeAccessIssue]
    if "disallow" in str(guard):
        jax.config.update("jax_transfer_guard", "allow")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = cache_folder()
        if folder is not None:
            jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
    # By default, JAX does not keep programs that compile within a second. A run has several.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    # A cache that cannot be written, or a damaged file in it, only costs time.
    warnings.filterwarnings("ignore", "Error (writing|reading) persistent compilation cache")
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        with contextlib.suppress(RuntimeError):  # JAX has computed already
            jax.config.update("jax_num_cpu_devices", cpu_devices)
    # XLA has a thread for each device, all of which a collective operation may hold while it waits
    # for the last device, which waits for a thread, until XLA ends the process: so ended 2 of 19
    # short runs of 8 devices on 2 cores. With this variable, which XLA reads, none of 40.
    devices = int(os.environ.get("JAX_NUM_CPU_DEVICES", cpu_devices))
    if devices > (os.cpu_count() or 1):
        os.environ.setdefault("NPROC", str(2 * devices))
    require_devices()


def require_devices() -> None:
    """**Raises:** `UserError` if JAX finds no device."""
    import jax

    platforms = os.environ.get("JAX_PLATFORMS")
    given = "" if platforms is None else f" of the platform {platforms}, as JAX_PLATFORMS says"
    with told(f"JAX finds no device{given}"):
        jax.devices()
        jax.device_put(0)  # on the default device, which JAX_DEFAULT_DEVICE may name


def chosen_dtype(compute_dtype: str, device: Any, has_stack: bool = True) -> str:
    """`training.compute_dtype` for a device of JAX's: `auto` is the faster one (benchmarks/NOTES.md
    has the figures). `has_stack`: whether the model has a `Stack`, which computes in the format of
    its parameters. For other modules, `auto` is float32."""
    if compute_dtype != "auto":
        return compute_dtype
    if not has_stack:
        return "float32"
    if device.platform == "cpu":
        return "bfloat16" if _has_bfloat16() else "float32"
    # GPUs of NVIDIA's before Ampere have none. Others do not say.
    capability = str(getattr(device, "compute_capability", ""))
    is_old = capability.partition(".")[0].isdecimal() and float(capability) < 8
    return "float32" if is_old else "bfloat16"


def with_chosen_dtype(config: Config) -> Config:
    """The config, with the number format that `auto` is on this machine."""
    import jax

    dtype: Any = chosen_dtype(config.training.compute_dtype, jax.devices()[0])
    training = dataclasses.replace(config.training, compute_dtype=dtype)
    return dataclasses.replace(config, training=training)


def _has_bfloat16() -> bool:
    """Whether this processor is faster in bfloat16. (Of those that are not x86, nothing was
    measured.)"""
    try:
        words = set(CPUINFO.read_text("utf-8", errors="ignore").split())
    except OSError:
        return False
    # With AVX512-BF16 alone, AMD's are faster in it, and Intel's slower (benchmarks/NOTES.md).
    return "amx_bf16" in words or {"avx512_bf16", "AuthenticAMD"} <= words


def usable_cpu_devices(training: TrainingConfig, mesh: MeshConfig) -> int:
    """As many as `mesh` has, if it says it; else `training.cpu_devices`, reduced so that the
    devices share a batch evenly. A config may come from a stranger: no more than `MAX_PER_CORE`
    for each core of the machine."""
    most = max(MIN_DEVICES, MAX_PER_CORE * (os.cpu_count() or 1))
    rows = training.batch_size // (training.accumulation or 1)
    sizes = (mesh.data, mesh.fsdp, mesh.tensor)
    if -1 not in sizes and math.prod(sizes) <= most:
        return math.prod(sizes)
    tensor = min(max(1, mesh.tensor), most)
    return tensor * math.gcd(max(1, min(training.cpu_devices, most) // tensor), rows)
