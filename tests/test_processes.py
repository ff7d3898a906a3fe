"""Several processes on this machine that train one run, and what each of them has."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, TEXT, run_script
from hypothesis import given, settings, strategies as st

from gptlite.config import DistributedConfig, UserError
from gptlite.runs.checkpoints import survey
from gptlite.sharding import local_rows, make_mesh, place
from gptlite.text.batches import Batches

TRAIN = [sys.executable, str(ROOT / "train.py")]
SETTINGS = (
    "--optimizer.name adamw --optimizer.learning-rate 0.01 --model.n-layers 1 --model.n-heads 2",
    "--model.d-model 16 --model.context-length 16 --model.dropout 0.1 --training.batch-size 8",
    "--training.compute-dtype float32 --training.steps 4 --training.log-every 1",
    "--training.eval-every 2 --training.sample-tokens 2",
)


def start(folder: Path, commands: list[list[str]]) -> list[subprocess.CompletedProcess[str]]:
    """`train.py` with each of the commands, as processes of one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    common = ["--distributed.coordinator", address, "--distributed.processes", str(len(commands))]
    processes = [
        subprocess.Popen(
            [*TRAIN, *command, *common, "--distributed.process", str(process)],
            cwd=folder,
            env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process, command in enumerate(commands)
    ]
    said = [process.communicate(timeout=200) for process in processes]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *streams)
        for process, streams in zip(processes, said, strict=True)
    ]


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def test_two_processes_train_what_one_does(tmp_path):
    """Each has half of the rows of a batch, and half of every matrix. The run goes on in one, on
    another mesh."""
    (tmp_path / "rhyme.txt").write_text(TEXT, encoding="utf-8")
    command = ["quick", "--data.corpus", "rhyme.txt", *" ".join(SETTINGS).split()]
    done = run_script("train.py", *command, "--run", "one", folder=tmp_path)
    assert done.code == 0, done.err
    done = start(tmp_path, [[*command, "--run", "two", "--mesh.fsdp", "2"]] * 2)
    assert [x.returncode for x in done] == [0, 0], done
    assert "validation loss" in done[0].stdout
    assert "loss" not in done[1].stdout
    assert "Involuntary" not in done[0].stderr
    one, two = (metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    for wanted, line in zip(one, two, strict=True):
        for loss in wanted.keys() & {"train_loss", "val_loss", "grad_norm"}:
            np.testing.assert_allclose(line[loss], wanted[loss], rtol=1e-5)
    more = ["--resume", "two", "--data.corpus", "rhyme.txt", "--training.steps", "6"]
    more += ["--mesh.fsdp", "1", "--mesh.tensor"]
    done = run_script("train.py", *more, "2", folder=tmp_path)
    assert done.code == 0, done.err
    assert "(fsdp 2, tensor 1) and continues on 2 x cpu (fsdp 1, tensor 2)" in done.out
    assert metrics(tmp_path / "runs" / "two")[-1]["step"] == 6
    done = run_script("train.py", *more, "3", folder=tmp_path)
    assert done.code == 2
    assert "must divide the number of devices" in done.err


def test_processes_with_different_texts_end_with_one_message(tmp_path):
    for name, text in (("a.txt", TEXT), ("b.txt", TEXT[::-1])):
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = start(tmp_path, [["quick", "--data.corpus", name] for name in ("a.txt", "b.txt")])
    assert [x.returncode for x in done] == [2, 2], done
    assert "error: The processes have different corpora" in done[0].stderr
    assert not any("error" in x.stderr for x in done[1:])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"processes": 2}, "give all three, or none"),
        ({"coordinator": "here", "processes": 2, "process": 0}, "must be HOST:PORT, got 'here'"),
        ({"coordinator": "a:1", "processes": 2, "process": 2}, "below distributed.processes, 2"),
        ({"missing_seconds": 0}, "missing_seconds must be at least 1"),
    ],
)
def test_a_wrong_description_of_the_processes_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        DistributedConfig(**fields)


def test_a_first_process_that_does_not_come_is_not_waited_for(tmp_path):
    words = "--distributed.connect-seconds 1 --distributed.coordinator 127.0.0.1:9"
    words += " --distributed.processes 2 --distributed.process 1"
    command = [*TRAIN, "quick", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "error: Process 0 of the run does not answer at 127.0.0.1:9 after 1 s" in done.stderr
    assert done.returncode == 2


def test_a_process_reads_its_own_rows():
    tokens = np.arange(1000)
    whole = Batches(tokens, 6, 8, seed=1)
    some = Batches(tokens, 6, 8, seed=1, rows=np.array([4, 1]))
    np.testing.assert_array_equal(some(70), whole(70)[[4, 1]])
    np.testing.assert_array_equal(local_rows(make_mesh(), 6), np.arange(6))


@settings(max_examples=20)
@given(shape=st.lists(st.integers(0, 4), max_size=3), seed=st.integers(0, 100))
def test_a_checksum_sees_every_bit_and_every_place(shape, seed):
    chance = np.random.default_rng(seed)
    array = chance.normal(size=shape).astype(np.float32)
    sums = survey({"x": jnp.asarray(array)})["x"]
    assert sums[0] == 0
    if not array.size:
        return
    place = np.unravel_index(chance.integers(array.size), shape)
    bit = np.zeros(shape, np.uint32)
    bit[place] = 1 << chance.integers(32)
    flipped = survey({"x": jnp.asarray((array.view(np.uint32) ^ bit).view(np.float32))})["x"]
    assert (flipped[1:] != sums[1:]).all()
    turned = np.ascontiguousarray(array.reshape(-1)[::-1]).reshape(shape)
    if array.size > 1:
        assert (survey({"x": jnp.asarray(turned)})["x"][1:] != sums[1:]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "uint8"])
def test_a_checksum_does_not_depend_on_the_devices(dtype):
    array = jnp.arange(64).reshape(8, 8).astype(dtype)
    cut = place({"up": {"weight": array}}, make_mesh(fsdp=2))["up"]["weight"]
    np.testing.assert_array_equal(survey({"x": cut})["x"], survey({"x": array})["x"])
    assert survey({"x": jnp.array([1.0, jnp.nan])})["x"][0] == 1
