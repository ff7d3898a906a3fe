"""Free memory, of devices, of the machine, and of a container."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptlite.errors import UserError

# Copies of the cache in memory while texts are read: before and after the call, and inside it.
CACHE_COPIES = 3


def free_memory(devices: int | None = None) -> int:
    """Free bytes of so many devices together; default: of all that this process has (JAX does not
    tell those of others). On a CPU: of the machine or, if that is less, of what this container may
    use. If unknown: 8 GiB."""
    import jax

    stats = jax.local_devices()[0].memory_stats()
    if stats is not None and "bytes_limit" in stats:
        count = jax.local_device_count() if devices is None else devices
        return count * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return min([*_free_in_machine(), *free_in_container()], default=2**33)


def require_memory(what: str, needed: int) -> None:
    """**Raises:** `UserError` if `what`, of so many bytes, does not fit into memory. (Linux would
    grant the memory, and end the process when it is used.)"""
    if needed > 2**26 and needed > (free := free_memory()):
        raise UserError(
            f"{what} takes {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free: use a "
            "smaller model, or less at once."
        )


def check_cache_memory(model: Any, batch: int, capacity: int, part: int, copied: int) -> None:
    """**Raises:** `UserError` if memory is too small to generate with a `GPT`: for the caches of
    `batch` texts, the scores of `part` tokens in one layer, and a copy of `copied` bytes of the
    model."""
    import equinox as eqx

    from gptlite.machine.pytrees import size_of

    needed = copied
    # To ask the cache for its size takes as long as 50 tokens of a small model. So a cache of 16
    # MiB or less, if it has keys and values in float32, is not asked.
    if 8 * batch * capacity * model.config.n_layers * model.config.d_model > 2**24:
        cache = eqx.filter_eval_shape(lambda m: m.init_cache((batch,), capacity=capacity), model)
        scores = 4 * batch * model.config.n_heads * part * capacity  # float32
        needed += CACHE_COPIES * size_of(cache) + scores
    require_memory(f"Generation of {batch} x {capacity:,} tokens", needed)


def _free_in_machine() -> Iterator[int]:
    if os.path.exists("/proc/meminfo"):  # Linux, where cached files count as free
        match = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text("ascii"))
        if match is not None:
            yield 1024 * int(match[1])
    elif "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_in_container(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """Free bytes of each control group of Linux that has a limit and holds this process: of version
    2, and of version 1, as the kernel documents them. Inside a container, its group is the root."""
    try:
        lines = groups.read_text("utf-8", "surrogateescape").splitlines()  # any names
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
