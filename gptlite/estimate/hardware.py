"""Devices that a program can be compiled for without having one: figures and descriptions."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gptlite.errors import UserError, require


@dataclass(frozen=True)
class Hardware:
    """The limits of a device. Rates are those of the data sheet, in one direction."""

    kind: str
    """JAX's name of the device."""
    flops: float
    """Products in bfloat16 a second, two for each multiply-add, without sparsity."""
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes a second, from and to the memory."""
    link: float
    """Bytes a second that a device receives from the others of its host, or of its TPU slice."""
    source: str
    gpu: str | None = None
    """The description of the device that XLA's GPU compiler asks for."""
    network: float | None = None
    """Bytes a second that a GPU receives from other hosts, in NVIDIA's own DGX machines."""
    slices: str = ""
    """The slices of a TPU with two dimensions. The compiler knows those of others."""


# XLA's GPU compiler wants to know more of its target than a data sheet says. These are the figures
# of CUDA's device query, as in XLA's own specifications (xla/backends/gpu/target_config/specs).
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  threads_per_core_limit: 2048  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  shared_memory_per_core: {shared}  shared_memory_per_block_optin: {optin}
  core_count: {cores}  fpus_per_core: {fpus}  clock_rate_ghz: {clock}  l2_cache_size: {cache}
  memory_bandwidth: {bandwidth}  device_memory_size: {memory}
  cuda_compute_capability {{ {capability} }}
}}
platform_name: "CUDA"  dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{name}"
"""


def _gpu(flops: float, link: float, network: float, source: str, **spec: Any) -> Hardware:
    return Hardware(
        kind=spec["name"],
        flops=flops,
        memory=spec["memory"],
        bandwidth=spec["bandwidth"],
        link=link,
        source=source,
        network=network,
        gpu=_GPU.format(**spec),
    )


# Google gives the sum of both directions, and of all ports, of a TPU's links.
_GOOGLE = "docs.cloud.google.com/tpu/docs/"
_FLAT = "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"
HARDWARE: dict[str, Hardware] = {
    "a100": _gpu(
        312e12,
        300e9,
        25e9,
        "NVIDIA A100 80GB SXM data sheet",
        name="NVIDIA A100-SXM4-80GB",
        memory=85_100_068_864,
        bandwidth=2_039_000_000_000,
        shared=167_936,
        optin=166_912,
        cores=108,
        fpus=64,
        clock=1.41,
        cache=41_943_040,
        capability="major: 8",
    ),
    "h100": _gpu(
        989.4e12,
        450e9,
        50e9,
        "NVIDIA H100 SXM data sheet",
        name="NVIDIA H100 80GB HBM3",
        memory=84_978_434_048,
        bandwidth=3_352_320_000_000,
        shared=233_472,
        optin=232_448,
        cores=132,
        fpus=128,
        clock=1.98,
        cache=52_428_800,
        capability="major: 9",
    ),
    "b200": _gpu(
        2250e12,
        900e9,
        50e9,
        "NVIDIA B200 (DGX B200) data sheet",
        name="NVIDIA B200",
        memory=191_514_411_008,
        bandwidth=7_672_000_000_000,
        shared=233_472,
        optin=232_448,
        cores=148,
        fpus=128,
        clock=1.965,
        cache=132_644_864,
        capability="major: 10",
    ),
    "v5e": Hardware("TPU v5 lite", 197e12, 16 * 2**30, 819e9, 200e9, _GOOGLE + "v5e", slices=_FLAT),
    "v5p": Hardware("TPU v5", 459e12, 95 * 2**30, 2765e9, 600e9, _GOOGLE + "v5p"),
    "v6e": Hardware(
        "TPU v6 lite", 918e12, 32 * 2**30, 1638e9, 400e9, _GOOGLE + "v6e", slices=_FLAT
    ),
}
GPUS_PER_HOST = 8


def peak_flops(kind: str) -> float:
    """Products in bfloat16 a second, without sparsity, of the device that JAX calls `kind`.

    **Raises:** `UserError` if its figures are not known here.
    """
    known = {hardware.kind: hardware.flops for hardware in HARDWARE.values()}
    require(kind in known, f"The peak of {kind!r} is not known. Known are: {', '.join(known)}.")
    return known[kind]


def describe(target: str) -> tuple[Hardware, Sequence[Any]]:
    """The hardware of `target`, `h100:8` (so many GPUs, in hosts of 8) or `v5e:4x4` (a slice of a
    TPU), and JAX's descriptions of its devices.

    **Raises:** `UserError` if there is no such target, or its compiler is not installed.
    """
    name, _, size = target.partition(":")
    hardware = HARDWARE.get(name)
    if hardware is None or not re.fullmatch(
        r"[1-9]\d{0,4}" if hardware.gpu else r"\d{1,3}(x\d{1,3}){1,2}", size
    ):
        raise UserError(
            "--for must be a GPU and how many of them, such as h100:8, or a TPU and the "
            f"shape of its slice, such as v5e:4x4, got {target!r}. There are: "
            f"{', '.join(HARDWARE)}."
        )
    slices = hardware.slices.split(", ") if hardware.slices else []
    require(
        size in slices or not slices,
        f"--for {name}: slices are {hardware.slices}, got {size}.",
    )
    require(
        hardware.gpu is not None or bool(slices) or size.count("x") == 2,
        f"--for {name}: a slice has three sizes, such as 4x4x4, got {size}.",
    )
    count = int(size) if hardware.gpu else 1
    require(
        count <= GPUS_PER_HOST or count % GPUS_PER_HOST == 0,
        f"--for {name}: hosts have {GPUS_PER_HOST} GPUs, so more than these must be a "
        f"multiple of {GPUS_PER_HOST}, got {count}.",
    )
    import jax
    from jax.experimental import topologies

    # This machine's devices are not used. (And a TPU's compiler finds none of its own here.)
    jax.config.update("jax_platforms", "cpu")
    try:
        if hardware.gpu is None:
            # No TPU is taken from another process. No questions about this machine, to Google's
            # servers or in warnings.
            os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
            os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
            os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
            # By default, a host has four chips.
            alone = {"chips_per_host_bounds": (1, 1, 1)} if size == "1x1" else {}
            return hardware, topologies.get_topology_desc(target, "tpu", **alone).devices
        hosts = math.ceil(count / GPUS_PER_HOST)
        topology = topologies.get_topology_desc(
            name, "cuda", topology=f"{hosts}x1x{count // hosts}", target_config=hardware.gpu
        )
        return hardware, topology.devices
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"There is no slice {target}: {reason}."
            if "INVALID_ARGUMENT" in reason
            else f"The compiler for {target} cannot be used here: {reason}. If it is not "
            'installed: pip install "gptlite-jax[aot]", on Linux.'
        ) from error
