import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from conftest import ROOT

from gptlite.config import MeshConfig, TrainingConfig
from gptlite.machine import runtime
from gptlite.machine.memory import free_in_container, free_memory
from gptlite.machine.runtime import chosen_dtype, usable_cpu_devices

PROGRAM = """
import json, os
import jax
from gptlite.machine.runtime import set_up_jax
set_up_jax(cpu_devices=3)
least = jax.config.jax_persistent_cache_min_compile_time_secs
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # on a machine of any speed
jax.jit(lambda x: jax.numpy.linalg.inv(jax.numpy.sort(x) @ x))(jax.numpy.eye(8))
threads = os.environ.get("NPROC")
print(json.dumps([jax.config.jax_compilation_cache_dir, jax.device_count(), least, threads]))
"""


def settings(**environment):
    names = (
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_NUM_CPU_DEVICES",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
        "NPROC",
        "XDG_CACHE_HOME",
    )
    clean = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_no_more_devices_are_made_of_a_cpu_than_can_share_a_batch():
    for rows, tensor, wanted, found in ((8, 1, 2, 2), (1, 1, 2, 1), (6, 1, 4, 2), (8, 2, 8, 8)):
        training = TrainingConfig(batch_size=2 * rows, accumulation=2, cpu_devices=wanted)
        assert usable_cpu_devices(training, MeshConfig(tensor=tensor)) == found


@pytest.mark.processes
def test_compiled_programs_are_kept_in_the_users_cache_folder(tmp_path):
    cache, devices, least, _ = settings(XDG_CACHE_HOME=str(tmp_path))
    assert cache == str(tmp_path / "gptlite" / "xla")
    assert devices == 3
    assert least < 1  # JAX's default, a second, keeps almost nothing of a small model
    assert list((tmp_path / "gptlite" / "xla").iterdir())


@pytest.mark.processes
def test_jaxs_own_environment_variables_go_first(tmp_path):
    cache, devices, least, threads = settings(
        JAX_COMPILATION_CACHE_DIR=str(tmp_path),
        JAX_NUM_CPU_DEVICES="1",
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.5",
    )
    assert [cache, devices, least, threads] == [str(tmp_path), 1, 0.5, None]


@pytest.mark.processes
def test_more_devices_than_cores_have_threads_to_wait_in(tmp_path):
    """Or they may wait for each other until XLA ends the process."""
    count = 2 * (os.cpu_count() or 1)
    given = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_NUM_CPU_DEVICES": str(count)}
    _, devices, _, threads = settings(**given)
    assert [devices, threads] == [count, str(2 * count)]
    *_, threads = settings(**given, NPROC="77")
    assert threads == "77"


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_of_a_container_is_less_than_that_of_the_machine(version, tmp_path):
    """The group of this process has no limit, the one above it has one."""
    controllers, base, limit, used = {
        1: ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: ("", "", "memory.max", "memory.current"),
    }[version]
    groups = tmp_path / "cgroup"
    groups.write_text(f"7:cpu:/other\n3:{controllers}:/pod/one\n")
    pod = tmp_path / base / "pod"
    (pod / "one").mkdir(parents=True)
    for folder, most in ((pod, "1000"), (pod / "one", "max")):
        (folder / limit).write_text(f"{most}\n")
        (folder / used).write_text("700\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert list(free_in_container(tmp_path, groups)) == [450]
    assert list(free_in_container(tmp_path, tmp_path / "absent")) == []


def test_a_group_of_any_name_is_read(tmp_path):
    (tmp_path / "cgroup").write_bytes("0::/ä\n".encode("latin-1"))
    assert list(free_in_container(tmp_path, tmp_path / "cgroup")) == []


def test_free_memory_is_that_of_devices_of_this_process(monkeypatch):
    stats = {"bytes_limit": 100, "bytes_in_use": 30}
    other, own = (SimpleNamespace(memory_stats=x) for x in (lambda: 1 / 0, lambda: stats))
    monkeypatch.setattr(jax, "devices", lambda: [other, own, own])
    monkeypatch.setattr(jax, "local_devices", lambda: [own, own])
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    assert (free_memory(), free_memory(devices=1)) == (140, 70)


def test_free_memory_is_some_and_not_more_than_there_is():
    there_is = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_memory() <= there_is


def test_no_more_devices_are_made_of_a_cpu_than_the_machine_can_have(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert usable_cpu_devices(TrainingConfig(batch_size=1024), MeshConfig(data=8)) == 8
    assert usable_cpu_devices(TrainingConfig(batch_size=1024), MeshConfig(data=1024)) == 2
    assert usable_cpu_devices(TrainingConfig(batch_size=1024, cpu_devices=1024), MeshConfig()) == 16
    assert usable_cpu_devices(TrainingConfig(batch_size=1024), MeshConfig(tensor=10**9)) == 16


@pytest.mark.parametrize(
    ("platform", "words", "capability", "dtype"),
    [
        ("cpu", "flags : fpu avx avx2 fma", None, "float32"),
        ("cpu", "flags : avx512f avx512_vnni", None, "float32"),
        ("cpu", "vendor_id : AuthenticAMD\nflags : avx512f avx512_bf16", None, "bfloat16"),
        ("cpu", "vendor_id : GenuineIntel\nflags : avx512f avx512_bf16", None, "float32"),
        ("cpu", "vendor_id : GenuineIntel\nflags : avx512_bf16 amx_bf16", None, "bfloat16"),
        ("cpu", "Features : fp asimd bf16 i8mm", None, "float32"),  # ARM
        ("cpu", None, None, "float32"),  # no Linux
        ("gpu", None, "7.5", "float32"),
        ("gpu", None, "8.0", "bfloat16"),
        ("gpu", None, "9.0", "bfloat16"),
        ("gpu", None, "gfx942", "bfloat16"),
        ("tpu", None, None, "bfloat16"),
    ],
)
def test_the_number_format_is_that_of_the_device(
    platform, words, capability, dtype, tmp_path, monkeypatch
):
    if words is not None:
        (tmp_path / "cpuinfo").write_text(words)
    monkeypatch.setattr(runtime, "CPUINFO", tmp_path / "cpuinfo")
    given = {} if capability is None else {"compute_capability": capability}
    device = SimpleNamespace(platform=platform, **given)
    assert chosen_dtype("auto", device) == dtype
    for given in ("float32", "bfloat16"):
        assert chosen_dtype(given, device) == given
