"""How the scripts configure JAX."""

import math
import os
import warnings
from pathlib import Path

from gptlite.config import MeshConfig, TrainingConfig


def usable_cpu_devices(training: TrainingConfig, mesh: MeshConfig) -> int:
    """`training.cpu_devices`, reduced so that the devices share a batch evenly."""
    rows = training.batch_size // training.accumulation
    return mesh.tensor * math.gcd(max(1, training.cpu_devices // mesh.tensor), rows)


def set_up_jax(cpu_devices: int = 1) -> None:
    """Keep compiled programs in the user's cache folder, so that later starts load them,
    and make `cpu_devices` devices of the CPU. To be called before JAX first computes.

    JAX's own environment variables, JAX_COMPILATION_CACHE_DIR and JAX_NUM_CPU_DEVICES, take
    precedence.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(caches / "gptlite" / "xla"))
    # By default, JAX does not keep programs that compile within a second. A run has several.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    # A cache that cannot be written, or a damaged file in it, only costs time.
    warnings.filterwarnings("ignore", "Error (writing|reading) persistent compilation cache")
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
