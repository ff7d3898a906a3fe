"""One training on many meshes: the same losses, whatever the devices, and no needless traffic."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, tiny_model
from jax.sharding import AbstractMesh, PartitionSpec as P
from support import meshes

from gptlite.config import MeshConfig, ModelConfig
from gptlite.errors import UserError
from gptlite.machine.mesh import arranged, check_tensor, local, make_mesh, place
from gptlite.runs.weights import named_arrays
from gptlite.sharding import AXES, constrain, parameter_spec

MESHES = ["(8, 1, 1)", "(1, 8, 1)", "(2, 2, 2)", "(1, 1, 8)"]
MIXED = "(2, 2, 2)"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What meshes.py finds with eight devices, and threads enough for them to wait for each other
    (see gptlite/machine/runtime.py)."""
    devices = {"JAX_NUM_CPU_DEVICES": "8", "NPROC": "16"}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "meshes.py"],
        cwd=ROOT,
        env=os.environ | devices | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Involuntary full rematerialization" not in done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_two_devices_train_what_one_does(mesh):
    """Of the meshes of eight below, the smallest."""
    alone, together = (meshes.train("gpt2", "adamw", one, steps=4) for one in ((1, 1, 1), mesh))
    np.testing.assert_allclose(together, alone, rtol=1e-5)


def check_equal(found, case: str, to: str, steps: int, rtol: float) -> None:
    losses, wanted = (np.array(found["losses"][name]) for name in (case, to))
    np.testing.assert_allclose(losses[0], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(losses[:steps], wanted[:steps], rtol=rtol)
    assert wanted[-1] < wanted[0]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *(("gpt2", mesh) for mesh in MESHES),
        ("experts", MIXED),
        ("adapters", MIXED),
        ("translation", MIXED),
    ],
)
def test_a_mesh_changes_no_loss(found, name, mesh):
    """AdamW, with dropout except in "translation", which has padding. Only the order of float32
    sums differs."""
    check_equal(found, f"{name} adamw {mesh}", f"{name} adamw (1, 1, 1)", 20, rtol=1e-4)


@pytest.mark.processes
def test_a_mesh_changes_little_with_muon(found):
    """Its iterations are in bfloat16, where another order of sums may round to another number."""
    check_equal(found, f"gpt2 muon {MIXED}", "gpt2 muon (1, 1, 1)", 20, rtol=1e-3)


@pytest.mark.processes
def test_dropout_does_not_depend_on_the_number_of_devices(found):
    check_equal(found, "gpt2 adamw (8, 1, 1)", "gpt2 adamw (1, 1, 1)", 100, rtol=1e-4)


@pytest.mark.processes
def test_padding_and_the_balance_loss_do_not_depend_on_parts_or_devices(found):
    check_equal(found, "parts 4", "translation adamw (1, 1, 1)", 20, rtol=1e-4)


@pytest.mark.processes
def test_the_compiled_step_gathers_each_matrix_once_and_nothing_else(found):
    """12 matrices of the blocks, the embedding and the head. Without the model's constraints there
    are 44 all-gathers and 16 all-to-alls, and three times the memory."""
    alone, cut, mixed = (found["compiled"][mesh] for mesh in MESHES[:3])
    assert alone["all-gather"] == alone["all-to-all"] == alone["collective-permute"] == 0
    assert alone["all-reduce"] == 1
    for counts in (cut, mixed):
        assert counts["all-gather"] == 14
        assert counts["all-to-all"] == counts["collective-permute"] == 0
    assert cut["all-reduce"] <= 2
    assert mixed["all-reduce"] <= 20
    assert cut["temporary"] < 1.1 * alone["temporary"]
    assert mixed["temporary"] < 1.3 * alone["temporary"]


@pytest.mark.processes
def test_muon_exchanges_matrices_and_gathers_none(found):
    """On devices of fsdp. For each of two shapes: from parts of all matrices to some whole ones and
    back; before and after, arrays that are cut along another axis."""
    adamw, muon = found["compiled"]["(1, 8, 1)"], found["compiled"]["muon"]
    assert muon["all-to-all"] == 8
    assert muon["all-gather"] == adamw["all-gather"]
    assert muon["collective-permute"] == 0
    assert muon["all-reduce"] == adamw["all-reduce"]


@pytest.mark.processes
def test_devices_share_rows_and_heads_of_a_kernel(found):
    on_device, _ = found["heads"]["shapes"]
    assert on_device == [[2, 2, 5, 3], [2, 1, 6, 3]]
    assert found["heads"]["difference"] < 1e-6


def test_parameters_are_cut_by_name_where_devices_divide_them():
    mesh = AbstractMesh((1, 2, 4), AXES)
    for path, shape, wanted in (
        ("stack.blocks.attention.heads.query.weight", (3, 16, 8), P(None, "tensor", "fsdp")),
        ("stack.blocks.0.attention.heads.output.weight", (8, 16), P("fsdp", "tensor")),
        ("mu.stack.blocks.mlp.down.weight", (3, 8, 16), P(None, "fsdp", "tensor")),
        ("embedding.weight", (20, 8), P("tensor", "fsdp")),
        ("previous.1.weight", (20, 8), P("tensor", "fsdp")),
        ("head.weight", (65, 8), P(None, "fsdp")),  # 4 does not divide 65
        ("stack.blocks.mlp_residual.norm.weight", (4, 8), P()),
        ("stack.blocks.mlp.own.weight", (3, 6, 8), P(None, None, "fsdp")),
        ("step", (), P()),
    ):
        assert parameter_spec(path, shape, mesh) == wanted, path


def test_a_mesh_takes_all_devices():
    assert dict(make_mesh().shape) == {"data": 2, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(fsdp=2).shape) == {"data": 1, "fsdp": 2, "tensor": 1}
    assert dict(make_mesh(data=1, tensor=-1).shape) == {"data": 1, "fsdp": 1, "tensor": 2}
    for sizes in ((-1, 3, 1), (-1, 1, 4), (-1, 2, 2), (1, 1, 1), (2, 2, 1), (2, -1, 2)):
        with pytest.raises(UserError, match=r"do not make up the number of devices, 2"):
            make_mesh(**dict(zip(AXES, sizes, strict=True)))
    for sizes in ((0, 1, 1), (-1, -1, 1)):
        with pytest.raises(UserError, match=r"one of them may be -1 .*, got"):
            MeshConfig(*sizes)


@pytest.mark.parametrize(
    ("slices", "each", "shape", "inside"),
    [
        (2, 4, (2, 4, 1), {0: 2}),  # data across the slices, fsdp inside them
        (2, 4, (4, 1, 2), {0: 2}),
        (4, 2, (2, 4, 1), {0: 2, 1: 2}),  # more slices than rows: fsdp, too
        (3, 2, (1, 1, 6), {2: 3}),
        (6, 2, (4, 3, 1), {0: 2, 1: 3}),
    ],
)
def test_slow_links_are_crossed_along_data_first(slices, each, shape, inside):
    """`inside`: the axes that cross slices, and in how many parts."""
    devices = [
        SimpleNamespace(
            id=i, slice_index=i // each, process_index=i, platform="gpu", device_kind=""
        )
        for i in range(slices * each)
    ]
    found = np.vectorize(lambda device: device.slice_index)(arranged(devices, shape))
    assert found.shape == shape
    assert sorted(found.flat) == [i // each for i in range(slices * each)]
    for axis in range(3):
        lines = np.moveaxis(found, axis, -1).reshape(-1, shape[axis])
        assert {len(set(line)) for line in lines.tolist()} == {inside.get(axis, 1)}


def test_heads_that_devices_cannot_share_are_refused():
    check_tensor(4, ModelConfig(n_heads=8, n_kv_heads=4))
    with pytest.raises(UserError, match=r"n_kv_heads, 2: 1, 2 would do, got 4"):
        check_tensor(4, ModelConfig(n_heads=8, n_kv_heads=2))
    with pytest.raises(UserError, match=r"n_heads, 6, and .* 6: 1, 2, 3, 6 would do, got 4"):
        check_tensor(4, ModelConfig(n_heads=6, d_model=96))


def test_weights_of_a_spread_model_are_whole():
    model = tiny_model()
    spread = place(model, make_mesh(fsdp=2))
    assert not spread.embedding.weight.is_fully_replicated
    for name, array in named_arrays(model).items():
        np.testing.assert_array_equal(named_arrays(local(spread))[name], array)
    ids = jnp.zeros((2, 3), jnp.int32)
    logits = eqx.filter_jit(local(spread))(ids)
    np.testing.assert_allclose(logits, eqx.filter_jit(model)(ids), rtol=1e-4, atol=1e-4)
    everywhere = local(place(model, make_mesh()))
    assert len(everywhere.embedding.weight.devices()) == 1


def test_without_a_mesh_a_constraint_does_nothing():
    x = jnp.ones((2, 3))
    assert constrain(x, "batch", None) is x
    with jax.set_mesh(jax.make_mesh((2,), ("other",))):
        assert constrain(x, "batch", None) is x
