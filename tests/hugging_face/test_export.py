"""The command lines that read and write Hugging Face's format. No reference is needed here."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from conftest import ROOT, TEXT, run_script, tiny_run
from support.runs import weights

TRAIN = tiny_run(training__sample_tokens=4)
BLOCK = """
import equinox as eqx


class Mine(eqx.nn.Linear):
    def __init__(self, config, *, key):
        super().__init__(config.d_model, config.d_model, use_bias=False, key=key)

    def __call__(self, x):
        return x @ self.weight
"""
SAMPLE = ["--prompt", "The", "--max-new-tokens", "20", "--seed", "3"]


def export(place: Path, *words: str) -> SimpleNamespace:
    return run_script("gptlite", "export", *words, folder=place)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A run, its export, and a run that cannot be exported."""
    place = tmp_path_factory.mktemp("hugging-face")
    (place / "text.txt").write_text(TEXT)
    done = run_script(
        "train.py", *TRAIN, "--run", "one", "--model.embed-previous", "0", folder=place
    )
    assert done.code == 0, done.err
    done = run_script("train.py", *TRAIN, "--run", "two", folder=place)
    assert done.code == 0, done.err
    exported = export(place, "one", "out")
    assert (exported.code, exported.err) == (0, "")
    assert "AutoModelForCausalLM.from_pretrained('out')" in exported.out
    return place


def test_an_exported_run_is_sampled_from_as_the_run_is(place):
    wanted = run_script("sample.py", "--run", "one", *SAMPLE, folder=place)
    found = run_script("sample.py", "--run", "hf:out", *SAMPLE, folder=place)
    assert (found.code, found.out) == (0, wanted.out)
    assert sorted(path.name for path in (place / "out").iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    with safetensors.safe_open(place / "out" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert export(place, "hf:out", "again").code == 0
    for path in (place / "out").iterdir():
        assert (place / "again" / path.name).read_bytes() == path.read_bytes()


def test_what_cannot_be_exported_is_said_and_nothing_is_written(place):
    done = export(place, "two", "new")
    assert done.code == 2
    assert "embeddings of earlier tokens (--model.embed-previous 0)" in done.err
    assert not (place / "new").exists()
    done = export(place, "one", "runs")
    assert done.code == 2
    assert "runs is not empty: give a new folder" in done.err


def test_generation_ends_with_the_models_end_of_text(place, tmp_path):
    """All characters but one end the text: the output is some times that one."""
    shutil.copytree(place / "out", tmp_path / "ends")
    vocabulary = json.loads((place / "out" / "tokenizer.json").read_text())["model"]["vocab"]
    ends = [i for character, i in vocabulary.items() if character != "e"]
    settings = tmp_path / "ends" / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": ends}))
    done = run_script("sample.py", "--run", "hf:ends", *SAMPLE, folder=tmp_path)
    assert done.code == 0, done.err
    assert set(done.out) <= {"e", "\n"}
    assert len(done.out) < 20
    settings.write_text(json.dumps({"eos_token_id": "two"}))
    done = run_script("sample.py", "--run", "hf:ends", *SAMPLE, folder=tmp_path)
    assert done.code == 2
    assert "The model's eos_token_id must be ids, got 'two'" in done.err


@pytest.mark.parametrize("source", ["hf:out", "runs/one"])
def test_training_starts_from_other_weights(place, source):
    words = ["--init-from", source, "--data.corpus", "text.txt", "--run", "more", "--overwrite"]
    words += ["--training.steps", "2", "--training.batch-size", "4", "--training.eval-every", "1"]
    still = ["--optimizer.learning-rate", "0", "--optimizer.adam-learning-rate", "0"]
    done = run_script("train.py", *words, *still, "--model.context-length", "12", folder=place)
    assert done.code == 0, done.err
    assert f"starting from the weights of {source}" in done.out
    old, new = (weights(place / "runs" / run) for run in ("one", "more"))
    assert old.keys() == new.keys()
    for name, array in old.items():
        np.testing.assert_array_equal(new[name], array)
    config = json.loads((place / "runs" / "more" / "config.json").read_text())
    assert config["training"]["init_from"] == source
    assert config["model"]["context_length"] == 12
    done = run_script("train.py", "--resume", "more", "--data.corpus", "text.txt",
                      "--training.steps", "3", folder=place)  # fmt: skip
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.n-layers", "2"], "set by the model hf:out: model.n_layers (1, got 2)"),
        (["--data.tokenizer", "byte"], "data.tokenizer ('hf:out', got 'byte')"),
        (["--model.context-length", "17"], "must be at most 16, that of hf:out, got 17"),
        (["--resume", "one"], "leave --init-from out"),
    ],
)
def test_options_that_disagree_with_the_weights_are_refused(place, words, said):
    words = ["--init-from", "hf:out", "--data.corpus", "text.txt", *words]
    done = run_script("train.py", *words, folder=place)
    assert done.code == 2
    assert said in done.err


def test_the_code_of_a_run_is_executed_only_if_the_command_names_it(place):
    """Neither to start from its weights nor to export it."""
    (place / "mine.py").write_text(BLOCK)
    block = ["--model.mlp", "mine.py:Mine"]
    done = run_script("train.py", *TRAIN, *block, "--run", "custom", folder=place)
    assert done.code == 0, done.err
    (place / "evil.py").write_text(f"open('EXECUTED', 'w')\n{BLOCK}")
    shutil.copytree(place / "runs" / "custom", place / "runs" / "evil")
    config = place / "runs" / "evil" / "config.json"
    config.write_text(config.read_text().replace("mine.py", "evil.py"))
    words = ["--data.corpus", "text.txt", "--training.steps", "2", "--run", "on", "--init-from"]
    done = run_script("train.py", *words, "evil", folder=place)
    assert done.code == 2
    assert "only if the command names a file with that class: --custom evil.py" in done.err
    done = export(place, "evil", "new")
    assert done.code == 2
    assert "mlp evil.py:Mine (--model.mlp swiglu)" in done.err
    assert not (place / "EXECUTED").exists()
    done = run_script("train.py", *words, "custom", "--custom", "mine.py", folder=place)
    assert done.code == 0, done.err


def test_what_sample_cannot_do_with_a_model_is_refused(place):
    done = run_script("sample.py", "--run", "hf:out", "--weights", "last", *SAMPLE, folder=place)
    assert done.code == 2
    assert "leave --weights last out" in done.err


@pytest.fixture(scope="module")
def hub(place) -> Iterator[tuple[str, list[str]]]:
    """A server with the hub's file endpoints, for the model me/tiny, and the paths asked for."""
    revision, asked = "a" * 40, []
    files = {path.name: path.read_bytes() for path in (place / "out").iterdir()}
    never = ("pytorch_model.bin", "code.py", "consolidated.safetensors", "onnx.safetensors")
    files |= dict.fromkeys(never, b"never read")

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            name = self.path.rsplit("/", 1)[1]
            if "/me/tiny/tree/" in self.path:
                self.answer_json(
                    [
                        {"type": "file", "path": name, "size": len(data), "oid": "b" * 40}
                        for name, data in files.items()
                    ]
                )
            elif self.path.startswith("/api/models/me/tiny/"):
                siblings = [{"rfilename": name} for name in files]
                self.answer_json({"id": "me/tiny", "sha": revision, "siblings": siblings})
            elif self.path.startswith("/me/tiny/resolve/") and name in files:
                self.answer(200, files[name], {"ETag": f'"{name}"', "X-Repo-Commit": revision})
            else:
                self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET  # noqa: N815

        def answer_json(self, value):
            self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def answer(self, code, body, headers):
            self.send_response(code)
            for header, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(header, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format, *_):  # noqa: A002 - its name
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def sample_from_hub(place: Path, name: str, endpoint: str, home: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, ROOT / "sample.py", "--run", f"hf:{name}", *SAMPLE],
        cwd=place,
        env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.processes
def test_a_model_is_fetched_from_the_hub_once(place, hub, tmp_path):
    endpoint, asked = hub
    wanted = run_script("sample.py", "--run", "hf:out", *SAMPLE, folder=place).out
    code, out, _ = sample_from_hub(place, "me/tiny", endpoint, tmp_path)
    assert (code, out) == (0, wanted)
    fetched = {path.rsplit("/", 1)[1] for path in asked if "/resolve/" in path}
    assert fetched == {path.name for path in (place / "out").iterdir()}
    # Then without a network.
    code, out, _ = sample_from_hub(place, "me/tiny", "http://127.0.0.1:9", tmp_path)
    assert (code, out) == (0, wanted)


NAMES = """
import sys
from gptlite.errors import UserError
from gptlite.hugging_face.hub import find_folder
for name in sys.argv[1:]:
    try:
        find_folder(name)
    except UserError as error:
        print(error)
"""


@pytest.mark.processes
def test_a_name_that_cannot_be_fetched_is_said_soon(hub, tmp_path):
    for endpoint, names, sentences in (
        ("http://127.0.0.1:9", ["gpt2"], ["gpt2 is no folder, and cannot be fetched from the hub"]),
        (
            hub[0],
            ["me/absent", "a b/../c", "a" * 300],
            ["RepositoryNotFoundError", *["no folder, and no name of a model on the hub"] * 2],
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-c", NAMES, *names],
            env=os.environ
            | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=30,
        )
        lines = done.stdout.splitlines()
        assert len(lines) == len(sentences), done.stderr
        for line, sentence in zip(lines, sentences, strict=True):
            assert sentence in line


def forged(place: Path, folder: Path) -> Path:
    """A copy of the exported model, that a test may change."""
    shutil.copytree(place / "out", folder / "model")
    return folder / "model"


def forge_head(path: Path, change) -> None:
    """Change the head of a safetensors file, with room for numbers as it says."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(content[8:end])
    change(head)
    place = 0
    for record in head.values():
        if "shape" in record:
            size = 4 * int(np.prod(record["shape"], dtype=object))
            record["data_offsets"], place = [place, place + size], place + size
    written = json.dumps(head).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written)
    os.truncate(path, 8 + len(written) + place)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (  # 12 GB, of which the file has none on the disk
            lambda head: head["model.embed_tokens.weight"].update(shape=[3 * 2**30, 1]),
            "has the shape [3221225472, 1], and the config calls for [",
        ),
        (
            lambda head: head["model.layers.0.mlp.up_proj.weight"].update(shape=[1, 16]),
            "has the shape [1, 16], and the config calls for [256, 16]",
        ),
        (
            lambda head: head["lm_head.weight"].update(dtype="I32"),
            "has numbers of the kind I32: F16, BF16, F32, F64 are read",
        ),
        (
            lambda head: head.update(
                {f"{i:0200}": {"dtype": "F32", "shape": [0]} for i in range(40_000)}
            ),
            "at most 8,388,608 are expected",
        ),
        (
            lambda head: head.update({"other": {"dtype": "F32", "shape": [2**32]}}),
            ", which gptlite has no place for",
        ),
    ],
    ids=["large", "layer", "kind", "head", "more"],
)
def test_a_tensor_is_compared_with_the_config_before_it_is_read(place, tmp_path, change, words):
    forge_head(forged(place, tmp_path) / "model.safetensors", change)
    done = run_script("sample.py", "--run", "hf:model", *SAMPLE, folder=tmp_path)
    assert done.code == 2
    assert words in done.err


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_is_a_link_to_itself_is_refused(place, tmp_path, name):
    model = forged(place, tmp_path)
    (model / name).unlink()
    (model / name).symlink_to(name)
    done = run_script("sample.py", "--run", "hf:model", *SAMPLE, folder=tmp_path)
    assert done.code == 2
    assert "cannot be read: [Errno" in done.err


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("value", ["", 0, [], False])
def test_a_window_of_the_wrong_type_is_refused(place, tmp_path, kind, value):
    path = forged(place, tmp_path) / "config.json"
    fields = json.loads(path.read_text())
    del fields["gptlite"]
    path.write_text(json.dumps(fields | {"model_type": kind, "sliding_window": value}))
    done = run_script("sample.py", "--run", "hf:model", *SAMPLE, folder=tmp_path)
    assert done.code == 2
    assert "The model's sliding_window must be a whole number from 1 to 10,000,000" in done.err
