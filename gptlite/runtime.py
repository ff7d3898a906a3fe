"""How the scripts configure JAX."""

import math
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from gptlite.config import MeshConfig, TrainingConfig, UserError


def usable_cpu_devices(training: TrainingConfig, mesh: MeshConfig) -> int:
    """As many as `mesh` has, if it says it; else `training.cpu_devices`, reduced so that the
    devices share a batch evenly."""
    rows = training.batch_size // (training.accumulation or 1)
    sizes = (mesh.data, mesh.fsdp, mesh.tensor)
    if -1 not in sizes and math.prod(sizes) <= 1024:
        return math.prod(sizes)
    tensor = max(1, mesh.tensor)
    return tensor * math.gcd(max(1, training.cpu_devices // tensor), rows)


def set_up_jax(cpu_devices: int = 1) -> None:
    """Keep compiled programs in the user's cache folder, so that later starts load them,
    and make `cpu_devices` devices of the CPU, with threads enough. To be called before JAX first
    computes.

    JAX's own environment variables, such as JAX_COMPILATION_CACHE_DIR and JAX_NUM_CPU_DEVICES, take
    precedence.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(caches / "gptlite" / "xla"))
    # By default, JAX does not keep programs that compile within a second. A run has several.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    # A cache that cannot be written, or a damaged file in it, only costs time.
    warnings.filterwarnings("ignore", "Error (writing|reading) persistent compilation cache")
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    # XLA has a thread for each device, all of which a collective operation may hold while it waits
    # for the last device, which waits for a thread, until XLA ends the process: so ended 2 of 19
    # short runs of 8 devices on 2 cores. With this variable, which XLA reads, none of 40.
    devices = int(os.environ.get("JAX_NUM_CPU_DEVICES", cpu_devices))
    if devices > (os.cpu_count() or 1):
        os.environ.setdefault("NPROC", str(2 * devices))


def free_memory() -> int:
    """Free bytes of all devices together. On a CPU: of the machine or, if that is less, of what
    this container may use. If unknown: 8 GiB."""
    import jax

    stats = jax.devices()[0].memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return jax.device_count() * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return min([*_free_in_machine(), *free_in_container()], default=2**33)


def require_memory(what: str, needed: int) -> None:
    """**Raises:** `UserError` if `what`, of so many bytes, does not fit into memory. (Linux would
    grant the memory, and end the process when it is used.)"""
    if needed > 2**26 and needed > (free := free_memory()):
        raise UserError(
            f"{what} takes {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free: use a "
            "smaller model, or less at once."
        )


def _free_in_machine() -> Iterator[int]:
    if os.path.exists("/proc/meminfo"):  # Linux, where cached files count as free
        found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text("ascii"))
        if found is not None:
            yield 1024 * int(found[1])
    elif "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_in_container(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """Free bytes of each control group of Linux that has a limit and holds this process: of version
    2, and of version 1, as the kernel documents them. Inside a container, its group is the root."""
    try:
        lines = groups.read_text("ascii").splitlines()
    except OSError:
        return
    for group in lines:
        _, controllers, name = group.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, limit, used = (
            (root, "memory.max", "memory.current")
            if controllers == ""
            else (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        folder = base / name.lstrip("/")
        for place in (folder, *folder.parents):
            try:
                most, now = (int((place / file).read_text("ascii")) for file in (limit, used))
                stats = (place / "memory.stat").read_text("ascii")
            except (OSError, ValueError):  # no such group here; "max" is no limit
                continue
            # Cached files are given back when memory is short.
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", stats, re.MULTILINE)
            yield max(0, most - now + (int(cached[1]) if cached else 0))
