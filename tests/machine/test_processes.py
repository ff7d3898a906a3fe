"""Several processes on this machine that train one run, and what each of them has."""

import signal
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TEXT, run_script
from hypothesis import given, settings, strategies as st
from support.kill_loop import metrics
from support.processes import SETTINGS, Processes
from support.runs import weights

import gptlite
from gptlite.errors import UserError
from gptlite.machine.mesh import local_rows, make_mesh, place
from gptlite.machine.processes import DistributedConfig, joined
from gptlite.runs.checkpoints import survey
from gptlite.runs.weights import named_arrays
from gptlite.text.batches import Batches


@pytest.mark.processes
def test_two_processes_train_what_one_does_until_one_is_told_to_stop(tmp_path):
    """Each has half of the rows of a batch, and half of every matrix. The run goes on in one, on
    another mesh."""
    (tmp_path / "rhyme.txt").write_text(TEXT, encoding="utf-8")
    command = ["quick", "--data.corpus", "rhyme.txt", *SETTINGS]
    command += ["--optimizer.schedule", "constant", "--optimizer.warmup-fraction", "0"]
    steps = ["--training.steps", "4"]
    done = run_script("train.py", *command, *steps, "--run", "one", folder=tmp_path)
    assert done.code == 0, done.err
    steps = ["--training.steps", "1000000", "--run", "two", "--mesh.fsdp", "2"]
    steps += ["--model.stack", "scan"]
    processes = Processes(tmp_path, *[[*command, *steps]] * 2)
    processes.wait_for("validation loss")
    processes.wait_for("step       4")
    processes.all[1].send_signal(signal.SIGTERM)
    assert processes.codes() == [128 + signal.SIGTERM] * 2, processes.said(0)
    assert "Involuntary" not in processes.said(0)
    assert processes.said(1).strip() == "stopping after this step; once more to stop at once"
    one, two = (metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    for wanted, line in zip(one, two, strict=False):
        for loss in wanted.keys() & {"train_loss", "val_loss", "grad_norm"}:
            np.testing.assert_allclose(line[loss], wanted[loss], rtol=1e-5)
    assert f"stopped at step {len(two)} of 1000000" in processes.said(0)
    # Each process has written its part of the checkpoint, and one alone reads them all.
    run = tmp_path / "runs" / "two"
    expected = weights(run, len(two))
    model = gptlite.load(run, "last").model
    for name, array in named_arrays(model).items():
        np.testing.assert_array_equal(array, expected[name])
    more = ["--resume", "two", "--data.corpus", "rhyme.txt"]
    more += ["--training.steps", str(len(two) + 2), "--mesh.fsdp", "1", "--mesh.tensor"]
    done = run_script("train.py", *more, "2", folder=tmp_path)
    assert done.code == 0, done.err
    assert "(fsdp 2, tensor 1) and continues on 2 x cpu (fsdp 1, tensor 2)" in done.out
    assert metrics(tmp_path / "runs" / "two")[-1]["step"] == len(two) + 2
    done = run_script("train.py", *more, "3", folder=tmp_path)
    assert done.code == 2
    assert "do not make up the number of devices, 2" in done.err


@pytest.mark.processes
def test_what_only_one_process_finds_wrong_ends_all_with_its_message(tmp_path):
    """Another text than that of process 0."""
    for name, text in (("a.txt", TEXT), ("b.txt", TEXT[::-1])):
        (tmp_path / name).write_text(text, encoding="utf-8")
    commands = [["quick", "--data.corpus", name] for name in ("a.txt", "b.txt")]
    processes = Processes(tmp_path, *commands)
    assert processes.codes() == [2, 2], processes.said(0)
    errors = [line for line in processes.said(0).splitlines() if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith("error: The processes have different corpora: the sha256 is ")
    assert errors[0].endswith("(process 1)")
    assert processes.said(1) == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.processes
def test_processes_that_were_given_different_settings_end_before_they_train(tmp_path):
    (tmp_path / "rhyme.txt").write_text(TEXT, encoding="utf-8")
    words = ["quick", "--data.corpus", "rhyme.txt", "--optimizer.learning-rate"]
    processes = Processes(tmp_path, [*words, "0.01"], [*words, "0.02", "--run", "other"])
    assert processes.codes() == [2, 2], processes.said(0)
    errors = [line for line in processes.said(0).splitlines() if "error" in line]
    assert errors == [
        "error: The processes have different settings: run is None in process 0, and other in "
        "process 1; optimizer.learning_rate is 0.01 in process 0, and 0.02 in process 1. "
        "(process 1)"
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.processes
def test_a_signal_before_training_ends_all_processes(tmp_path):
    program = (
        "import signal, sys, time\n"
        "from gptlite.scripts import train\n"
        "from gptlite.runs import start\n"
        "def wait(name):\n"
        "    if sys.argv[-1] == '1':\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "    time.sleep(60)\n"
        "start.load_corpus = wait\n"
        "train.main()"
    )
    processes = Processes(tmp_path, ["quick"], ["quick"], program=["-c", program])
    assert processes.codes() == [128 + signal.SIGTERM] * 2, processes.said(0)
    assert "error: stopped by a signal" in processes.said(0)


def test_a_port_that_is_taken_is_refused(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        words = f"--distributed.coordinator 127.0.0.1:{port} --distributed.processes 2"
        words += " --distributed.process 0"
        done = run_script("train.py", *words.split(), folder=tmp_path)
    assert done.code == 2
    assert f"error: Process 0 cannot listen at port {port} of --distributed.co" in done.err


# A state of so few bytes is not compared with the free memory otherwise.
ASK = """
from gptlite.scripts import train
from gptlite.machine import memory
require = memory.require_memory
def ask(*arguments):
    assert memory.free_memory() > 0
    require(*arguments)
from gptlite.runs import start
start.require_memory = ask
train.main()
"""


@pytest.mark.processes
def test_each_process_knows_its_own_memory(tmp_path):
    (tmp_path / "rhyme.txt").write_text(TEXT, encoding="utf-8")
    words = ["quick", "--data.corpus", "rhyme.txt", *SETTINGS, "--training.steps", "2"]
    processes = Processes(tmp_path, *[words] * 2, program=["-c", ASK])
    assert processes.codes() == [0, 0], processes.said(0)


class ConfigError(Exception):
    """As the package `kubernetes` raises it."""


@pytest.mark.parametrize("error", [KeyError("job-name"), RuntimeError("403"), ConfigError("none")])
def test_a_container_that_is_no_part_of_a_job_trains_alone(error, monkeypatch):
    def raise_from(file):
        scope = {"error": type(error)(*error.args)}  # another one has its own traceback
        exec(compile("def initialize(*_, **__): raise error", file, "exec"), scope)
        monkeypatch.setattr(jax.distributed, "initialize", scope["initialize"])

    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    raise_from("jax/_src/clusters/k8s_cluster.py")
    with joined(DistributedConfig()):
        pass
    raise_from("jax/_src/clusters/slurm_cluster.py")
    with pytest.raises(UserError, match="cannot be joined"), joined(DistributedConfig()):
        pass
    raise_from("jax/_src/clusters/k8s_cluster.py")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    with pytest.raises(UserError, match="cannot be joined"), joined(DistributedConfig()):
        pass


@pytest.mark.processes
def test_a_cluster_of_one_process_is_an_ordinary_run(tmp_path):
    alone = Processes(tmp_path, ["quick", "--data.corpus", "nowhere.txt"])
    assert alone.codes() == [2]
    assert alone.said(0).startswith("error: There is no corpus nowhere.txt")


@pytest.mark.processes
def test_a_killed_process_is_named(tmp_path):
    (tmp_path / "rhyme.txt").write_text(TEXT, encoding="utf-8")
    command = ["quick", "--data.corpus", "rhyme.txt", *SETTINGS, "--run", "long"]
    command += ["--training.steps", "1000000", "--distributed.missing-seconds", "5"]
    processes = Processes(tmp_path, command, command)
    processes.wait_for("step ")
    processes.all[1].kill()
    assert processes.codes() == [2, -signal.SIGKILL]
    assert "error: Process 1 of 2: not heard of for 5 s" in processes.said(0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"processes": 2}, "give all three, or none"),
        ({"coordinator": "here", "processes": 2, "process": 0}, "must be HOST:PORT, .* got 'here'"),
        ({"coordinator": "a:0", "processes": 2, "process": 0}, "a port from 1 to 65535"),
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
    done = run_script("train.py", *words.split(), folder=tmp_path)
    assert "error: Process 0 of the run does not answer at 127.0.0.1:9 after 1 s" in done.err
    assert done.code == 2


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
