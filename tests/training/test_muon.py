import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT

from gptlite.training.muon import COEFFICIENTS, orthogonalize, scale_by_orthogonalization


def newton_schulz(x):
    """In float64, one matrix at a time."""
    a, b, c = COEFFICIENTS
    x = np.float64(x) / np.linalg.norm(x)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def matrices(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 16, 48)])
def test_bfloat16_iterations_stay_near_float64s(shape):
    x = matrices(0, *shape)
    for ours, matrix in zip(orthogonalize(x), np.asarray(x), strict=True):
        exact = newton_schulz(matrix)
        # 8 bits, over five steps whose slope at small singular values is up to 3.4.
        assert np.linalg.norm(np.float32(ours) - exact) < 0.05 * np.linalg.norm(exact)


def test_batches_of_one_shape_are_taken_apart_again_and_scaled():
    updates = {
        "query": matrices(0, 3, 16, 16),
        "up": matrices(1, 3, 64, 16),
        "down": matrices(2, 3, 16, 64),
        "output": matrices(3, 3, 16, 16),
    }
    scale = scale_by_orthogonalization()
    done, _ = jax.jit(scale.update)(updates, scale.init(updates))
    for name, update in updates.items():
        for ours, matrix in zip(done[name], np.asarray(update), strict=True):
            tall = name == "up"
            exact = newton_schulz(matrix.T).T if tall else newton_schulz(matrix)
            factor = 1.0 if name in ("query", "output") else 2.0
            error = np.linalg.norm(np.float32(ours) - factor * exact)
            assert error < 0.05 * factor * np.linalg.norm(exact)


def test_devices_that_share_the_work_get_what_one_gets():
    """Three matrices on two devices: one share is padded."""
    program = """
import jax, sys
import numpy as np
jax.config.update("jax_num_cpu_devices", 2)
sys.path[:0] = ["tests", "tests/training"]
from jax.sharding import PartitionSpec as P
from test_muon import matrices, scale_by_orthogonalization
updates = {"a": matrices(0, 3, 8, 8), "b": matrices(1, 3, 32, 8)}
alone = scale_by_orthogonalization()
shared = scale_by_orthogonalization("data")
mesh = jax.make_mesh((2,), ("data",))
run = jax.shard_map(
    lambda u: shared.update(u, shared.init(u))[0],
    mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False,
)
ours, theirs = jax.jit(run)(updates), alone.update(updates, alone.init(updates))[0]
for name in updates:
    np.testing.assert_allclose(ours[name], theirs[name], atol=0.02)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
