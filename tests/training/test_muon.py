import jax
import numpy as np
import pytest

from gptlite.machine.mesh import make_mesh, replicate
from gptlite.training.muon import COEFFICIENTS, orthogonalize, scale_by_orthogonalization

# 8 bits to a number, and small singular values, with the rounding error beside them, are raised by
# up to 3.4 in each of five steps: 0.03 to 0.1 was seen. A wrong sign, turn or scale gives over 0.5.
TOLERANCE = 0.12


def newton_schulz(x):
    """In float64, one matrix at a time."""
    a, b, c = COEFFICIENTS
    x = np.asarray(x, np.float64) / np.linalg.norm(x)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def distance(ours, exact):
    """Relative, in the Frobenius norm."""
    return np.linalg.norm(np.float32(ours) - exact) / np.linalg.norm(exact)


def matrices(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 16, 48)])
def test_bfloat16_iterations_stay_near_float64s(shape):
    x = matrices(0, *shape)
    for ours, matrix in zip(orthogonalize(x), np.asarray(x), strict=True):
        exact = newton_schulz(matrix)
        assert distance(ours, exact) < TOLERANCE


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
            assert distance(ours, factor * exact) < TOLERANCE


def test_devices_that_share_the_work_get_what_one_gets():
    """Three matrices on two devices: one share is padded."""
    updates = {"a": matrices(0, 3, 8, 8), "b": matrices(1, 3, 32, 8)}
    scale = scale_by_orthogonalization()

    def run(updates):
        return scale.update(updates, scale.init(updates))[0]

    theirs = jax.jit(run)(updates)
    mesh = make_mesh()
    assert mesh.size == 2
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(replicate(updates, mesh)).compile()
        ours = compiled(replicate(updates, mesh))
    assert "bf16[2,8,8]" in str(compiled.as_text())  # of four, with the padding, two on each device
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        for matrix, other in zip(x, y, strict=True):
            assert distance(matrix, other) < TOLERANCE
