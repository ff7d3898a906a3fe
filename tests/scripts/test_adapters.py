"""Fine-tuning with adapters and frozen parameters by the scripts: files, resuming, merging."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from conftest import TEXT, run_script, tiny_run
from support.runs import weights

BASE = tiny_run(model__n_layers=2, model__embed_previous=0)
TUNE = """
--data.corpus text.txt --init-from base --training.batch-size 4 --training.steps 6
--training.eval-every 3 --training.sample-tokens 4 --optimizer.name adamw
"""
WAYS = {
    "lora": ["--model.lora", "2:matrices=query+down"],
    "frozen": ["--training.freeze", "embedding.*,stack.blocks.mlp.*"],
}


def arrays(path: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load(path.read_bytes())


def run(name: str, *words: str, folder: Path) -> str:
    done = run_script(name, *words, folder=folder)
    assert done.code == 0, done.err
    return done.out


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("adapters")
    (place / "text.txt").write_text(TEXT)
    run("train.py", *BASE, "--run", "base", folder=place)
    for way, words in WAYS.items():
        out = run("train.py", *TUNE.split(), *words, "--run", way, folder=place)
        assert "of which" in out
    return place


@pytest.mark.parametrize("way", WAYS)
def test_what_is_trained_is_saved_alone(place, way):
    base = weights(place / "runs" / "base")
    folder = place / "runs" / way
    frozen, best = arrays(folder / "frozen.safetensors"), weights(folder)
    assert not frozen.keys() & best.keys()
    if way == "lora":
        assert frozen.keys() == base.keys()
        names = {name.rpartition(".")[0] for name in best}
        assert names == {"stack.blocks.attention.heads.query", "stack.blocks.mlp.down"}
    else:
        assert frozen.keys() | best.keys() == base.keys()
        assert any(not np.array_equal(best[name], base[name]) for name in best)
    for name, array in frozen.items():
        np.testing.assert_array_equal(array, base[name])


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_resumed_ends_as_if_it_had_not_stopped(place, way, tmp_path):
    shutil.copy(place / "text.txt", tmp_path)
    shutil.copytree(place / "runs", tmp_path / "runs")
    folder = tmp_path / "runs" / way
    shutil.rmtree(folder / "checkpoints" / "6")
    (folder / "result.json").unlink()
    shutil.rmtree(tmp_path / "runs" / "base")  # which is not needed any more
    words = ["--resume", way, "--data.corpus", "text.txt"]
    out = run("train.py", *words, folder=tmp_path)
    assert "from step 3" in out
    for step in (3, 6):
        again, whole = (weights(p / "runs" / way, step) for p in (tmp_path, place))
        assert again.keys() == whole.keys()
        for key, array in whole.items():
            np.testing.assert_array_equal(again[key], array)
    # Frozen parameters that are not those of the run.
    (folder / "result.json").unlink()
    frozen = arrays(folder / "frozen.safetensors")
    frozen["embedding.weight"] = frozen["embedding.weight"] + 1
    (folder / "frozen.safetensors").write_bytes(safetensors.numpy.save(frozen))
    done = run_script("train.py", *words, folder=tmp_path)
    assert done.code == 2
    assert "frozen.safetensors is damaged" in done.err


@pytest.mark.parametrize("way", WAYS)
def test_samples_exports_and_other_runs_have_the_whole_model(place, way):
    sample = ["--prompt", "The", "--max-new-tokens", "20", "--greedy"]
    text = run("sample.py", "--run", way, *sample, folder=place)
    run("gptlite", "export", way, f"{way}-hf", folder=place)
    assert run("sample.py", "--run", f"hf:{way}-hf", *sample, folder=place) == text
    more = TUNE.replace("base", way).split()
    still = ["--optimizer.learning-rate", "0", "--run", f"{way}-more"]
    out = run("train.py", *more, *still, folder=place)
    losses = [
        json.loads((place / "runs" / name / "result.json").read_text())["best_val_loss"]
        for name in (way, f"{way}-more")
    ]
    # The adapters are a part of the matrices now: sums in another order.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert f"starting from the weights of {way}" in out
    config = json.loads((place / "runs" / f"{way}-more" / "config.json").read_text())
    assert config["model"]["lora"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.lora", "2"], "name it with --init-from"),
        (["--init-from", "base", "--model.lora", "x"], "must be a rank"),
        (["--init-from", "base", "--model.lora", "2:matrices=gate"], "has a Linear named gate"),
        (["--init-from", "base", "--training.freeze", "head"], "names no parameter"),
        (["--init-from", "base", "--training.freeze", "*"], "leaves nothing to train"),
    ],
)
def test_what_cannot_be_trained_is_refused(place, words, said):
    before = sorted(place.rglob("*"))
    done = run_script("train.py", "--data.corpus", "text.txt", *words, folder=place)
    assert done.code == 2
    assert said in " ".join(done.err.replace("│", " ").split())
    assert sorted(place.rglob("*")) == before
