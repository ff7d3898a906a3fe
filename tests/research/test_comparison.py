import csv
import dataclasses
import io
import json
import math
import shlex
from pathlib import Path

import pytest
from conftest import TEXT, TINY, refusal

from gptlite.cli import parse_compare
from gptlite.config import Config, DataConfig, TrainingConfig
from gptlite.errors import UserError
from gptlite.research import comparison as comparison_module, plots
from gptlite.research.comparison import Comparison
from gptlite.research.report import table, to_csv
from gptlite.research.seeds import SeedsProgress
from gptlite.runs.plots import save_picture
from gptlite.runs.tokenizers import make_tokenizer
from gptlite.scripts.compare import compare
from gptlite.text.corpus import text_corpus
from gptlite.text.tokens import split_corpus

TOKENIZER = make_tokenizer("char", text_corpus(TEXT))
SPLIT = split_corpus(text_corpus(TEXT), TOKENIZER)
BASE = Config(
    model=TINY,
    training=TrainingConfig(
        steps=8, batch_size=4, log_every=4, eval_every=4, compute_dtype="float32"
    ),
)
DEEPER = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, n_layers=3))


@pytest.fixture
def trained(monkeypatch):
    """What is trained, made up: seed s of the base ends at 2 + s / 10, of others 0.1 below it."""
    asked = []

    def fit_seeds(config, tokenizer, seeds, split):
        asked.append((config.model.n_layers, config.training.steps, list(seeds)))
        gain = 0.0 if config.model.n_layers == 1 else 0.1
        looks = max(2, config.training.steps // config.training.log_every)
        for look in range(1, looks + 1):
            losses = [2 + looks - look + seed / 10 - gain + 0.001 * seed * gain for seed in seeds]
            yield SeedsProgress(
                step=look * config.training.steps // looks,
                steps=config.training.steps,
                val_losses=losses,
                step_seconds=look * config.model.n_layers * 1.0,
            )

    monkeypatch.setattr(comparison_module, "fit_seeds", fit_seeds)
    return asked


def comparison(folder, equal="steps"):
    return Comparison(folder, BASE, equal, TOKENIZER, SPLIT, "0" * 64)


def run(it, name, config, seeds, at_once=None):
    return list(it.train(name, config, seeds, at_once))


def test_trained_seeds_are_not_trained_again(trained, tmp_path):
    run(comparison(tmp_path), "base", BASE, range(2))
    run(comparison(tmp_path), "base", BASE, range(2))
    assert trained == [(1, 8, [0, 1])]
    run(comparison(tmp_path), "base", BASE, range(5), at_once=2)
    assert trained[1:] == [(1, 8, [2, 3]), (1, 8, [4])]
    result = comparison(tmp_path).result("base", BASE, range(5))
    assert result.losses == pytest.approx([2.0, 2.1, 2.2, 2.3, 2.4])
    assert result.evaluated_at == [4, 8]
    assert result.curves[3] == pytest.approx([3.3, 2.3])
    assert comparison(tmp_path).trained("base", BASE, range(9)) == [0, 1, 2, 3, 4]


def test_a_stop_keeps_the_seeds_that_are_done(trained, tmp_path):
    training = comparison(tmp_path).train("base", BASE, range(4), at_once=2)
    for progress in training:
        if len(trained) == 2 and progress.step == 4:
            break
    del training
    assert comparison(tmp_path).trained("base", BASE, range(4)) == [0, 1]


def test_another_variant_under_the_same_name_is_refused(trained, tmp_path):
    run(comparison(tmp_path), "a", BASE, range(2))
    with pytest.raises(UserError, match=r"a-.*\.json was trained with another model\.n_layers: "):
        run(comparison(tmp_path), "a", DEEPER, range(2))
    with pytest.raises(UserError, match="another --equal:"):
        run(comparison(tmp_path, "flops"), "a", BASE, range(2))
    fewer = dataclasses.replace(BASE, data=DataConfig(validation_tokens=50))
    with pytest.raises(UserError, match=r"another data\.validation_tokens"):
        run(comparison(tmp_path), "a", fewer, range(2))
    idle = dataclasses.replace(BASE.training, save_seconds=7, cpu_devices=1, log_every=2)
    run(comparison(tmp_path), "a", dataclasses.replace(BASE, training=idle), range(2))
    assert len(trained) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("settings", 1), ("steps", None), ("steps", 10**400), ("evaluated_at", [4, 9])),
        *(("evaluated_at", []), ("evaluated_at", [4]), ("evaluated_at", [8, 8])),
        *(("evaluated_at", 4), ("curves", []), ("curves", {"0": [], "1": []})),
        *(("curves", {"0": [2.0, "2"], "1": [2.0, 2.0]}), ("seconds", {"0": 1.0})),
        ("seconds", {"0": 1.0, "1": -1.0}),
        ("curves", {"0": [2.0, -2.0], "1": [2.0, 2.0]}),
        *(("seconds", {"0": 1.0, "1": 10**400}), ("curves", {"0": 1, "1": 2})),
    ],
)
def test_a_damaged_file_is_refused(trained, tmp_path, name, value):
    run(comparison(tmp_path), "a", BASE, range(2))
    (file,) = tmp_path.glob("*.json")
    good = json.loads(file.read_text())
    for changed in (good | {name: value}, {key: x for key, x in good.items() if key != name}):
        file.write_text(json.dumps(changed))
        with pytest.raises(
            UserError,
            match=rf"a-.*\.json is damaged: .*({name}|value out of range|`int` <=|`float` >=)",
        ):
            run(comparison(tmp_path), "a", BASE, range(2))


def test_a_file_of_another_number_of_steps_is_refused(trained, tmp_path):
    run(comparison(tmp_path), "a", BASE, range(2))
    (file,) = tmp_path.glob("*.json")
    changed = json.loads(file.read_text()) | {"steps": 16, "evaluated_at": [4, 16]}
    file.write_text(json.dumps(changed))
    with pytest.raises(UserError, match="damaged: its steps are 16, and were to be 8"):
        run(comparison(tmp_path), "a", BASE, range(2))


def test_a_variant_that_cannot_be_built_is_refused_before_training(tmp_path):
    wrong = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, mlp="relu2:rank=4"))
    with pytest.raises(UserError, match=r"model\.mlp relu2 has no option rank"):
        comparison(tmp_path).trained("a", wrong, range(2))
    training = dataclasses.replace(BASE.training, freeze="embedding.*,stack.*")
    optimizer = dataclasses.replace(BASE.optimizer, name="muon")
    wrong = dataclasses.replace(BASE, training=training, optimizer=optimizer)
    with pytest.raises(UserError, match="muon is for the matrices of a Stack, and none is trained"):
        comparison(tmp_path).trained("a", wrong, range(2))
    wrong = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, context_length=10_000))
    with pytest.raises(UserError, match="training text is too short"):
        comparison(tmp_path).trained("a", wrong, range(2))


def test_long_and_similar_names_have_files_of_their_own(trained, tmp_path):
    for name in ("a/b", "a_b", "a" * 1000):
        run(comparison(tmp_path), name, BASE, range(2))
    assert len(list(tmp_path.glob("*.json"))) == len(trained) == 3


def test_a_seed_that_diverges_is_kept_and_said(monkeypatch, tmp_path):
    def fit_seeds(config, tokenizer, seeds, split):
        losses = [math.nan if config is not BASE and seed == 1 else 2.0 + seed for seed in seeds]
        yield SeedsProgress(8, 8, losses, 1.0)

    monkeypatch.setattr(comparison_module, "fit_seeds", fit_seeds)
    monkeypatch.setattr(comparison_module, "_with_steps", lambda config, steps: config)
    it, results = comparison(tmp_path), []
    for name, config in (("base", BASE), ("n_layers=3", DEEPER)):
        run(it, name, config, range(3))
        results.append(it.result(name, config, range(3)))
    assert "diverged (1 of 3 seeds)" in table(results)
    assert "the base diverged (1 of 3 seeds)" in table(results[::-1])
    assert "diverged" in to_csv(results)
    plots.comparison(results).savefig(tmp_path / "picture.png")


def test_equal_flops_and_equal_time(trained, tmp_path):
    (tmp_path / "flops").mkdir()
    (tmp_path / "time").mkdir()
    by_flops = comparison(tmp_path / "flops", "flops")
    base = run(by_flops, "base", BASE, range(2))
    deeper = run(by_flops, "deeper", DEEPER, range(2))
    one, three = (
        by_flops.result(name, config, range(2))
        for name, config in (("base", BASE), ("deeper", DEEPER))
    )
    assert base[-1].step == 8
    assert deeper[-1].step == round(8 * one.flops_per_token / three.flops_per_token) < 8
    by_time = comparison(tmp_path / "time", "time")
    run(by_time, "base", BASE, range(2))
    deeper = run(by_time, "deeper", DEEPER, range(2))
    assert deeper[-1].step == 3  # a third of the steps, as the made-up seconds say


def test_the_report(trained, tmp_path):
    it, results = comparison(tmp_path), []
    for name, config in (("base", BASE), ("n_layers=3", DEEPER)):
        run(it, name, config, range(3))
        results.append(it.result(name, config, range(3)))
    lines = table(results).splitlines()
    assert lines[2].split()[:4] == ["base", "2.1000", "±", "0.2484"]
    assert lines[3].startswith("n_layers=3  2.0001 ±")
    assert "-0.0999 ± " in lines[3]
    assert lines[3].endswith("better")
    assert lines[0].index("verdict") == lines[3].index("better")
    assert "mean of 3 seeds" in lines[-1]
    base, deeper = csv.DictReader(io.StringIO(to_csv(results)))
    assert [float(base[f"val_loss_seed_{seed}"]) for seed in range(3)] == results[0].losses
    assert float(deeper["difference"]) == pytest.approx(-0.0999)
    assert (base["verdict"], deeper["verdict"]) == ("", "better")
    named = [dataclasses.replace(result, name=rf"{result.name} $\no$") for result in results]
    for drawn in (results, named):  # a name may look like a formula
        save_picture(plots.comparison(drawn), tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "picture.png").unlink()
    figure = plots.comparison(results)
    figure.suptitle(r"$\no$")
    with pytest.raises(OSError, match="Matplotlib cannot draw it: "):
        save_picture(figure, tmp_path / "picture.png")
    assert not (tmp_path / "picture.png").exists()


def test_a_log_says_what_is_trained(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    words = """--data.corpus text.txt --model.n-layers 1 --model.n-heads 2 --model.d-model 16
        --model.context-length 16 --training.steps 4 --training.eval-every 4
        --vary model.norm=layer --seeds"""
    for seeds, training in ("2", "2 seeds"), ("3", "1 seed"), ("3", None):
        compare(parse_compare([*words.split(), seeds]))
        lines = capsys.readouterr().out.splitlines()
        names = [line for line in lines if line.startswith("training ")]
        variants = ("base (quick)", "norm=layer")
        wanted = [f"training {name}, {training} ..." for name in variants]
        assert names == (wanted if training else [])


def test_the_command_line():
    words = (
        "--base s --vary model.norm=layer,rms,dyt --vary model.mlp=moe:n_experts=8+model.n-layers=2"
        " --vary model.bias=true,false --vary optimizer.name=muon --training.steps 9"
    )
    arguments, variants = parse_compare(words.split())
    base = variants.pop("base (s)")
    assert arguments.config == base
    assert (base.training.steps, base.model.norm, base.model.bias) == (9, "layer", False)
    found = {
        name: (c.model.norm, c.model.mlp, c.model.n_layers, c.model.bias, c.optimizer.name)
        for name, c in variants.items()
    }
    assert found == {  # what is the base itself is not trained twice
        "norm=rms": ("rms", "gelu", 4, False, "adamw"),
        "norm=dyt": ("dyt", "gelu", 4, False, "adamw"),
        "mlp=moe:n_experts=8 n-layers=2": ("layer", "moe:n_experts=8", 2, False, "adamw"),
        "bias=true": ("layer", "gelu", 4, True, "adamw"),
        "optimizer.name=muon": ("layer", "gelu", 4, False, "muon"),
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "nothing to compare: give --vary"),
        ("--vary model.norm=rms", "nothing to compare"),
        ("--vary model.norm", "--vary takes SECTION.FIELD=VALUE,VALUE,..., got 'model.norm'"),
        ("--vary data.tokenizer=byte", "fields of model, optimizer and training"),
        ("--vary training.seed=1,2", "which --seeds varies"),
        ("--vary training.init_from=a", "models are trained from the beginning"),
        ("--vary model.lora=2", "models are trained from the beginning"),
        ("--model.lora 2 --vary model.norm=dyt", "from the beginning: leave --model.lora out"),
        ("--vary model.norm=dyt --init-from=a", "from the beginning: leave --init-from out"),
        ("--vary model.norm=rsm", "must be one of rms, layer, dyt"),
        ("--vary model.nrom=rms", "--model.nrom"),
        ("--vary model.norm=dyt --seeds 0", "seeds must be at least 1"),
        ("--vary model.norm=dyt --name a/b", "--name takes the name of a folder, which"),
        ("--vary model.norm=dyt --name \x1b[2J", "does not begin with a dot, got "),
        ("--vary model.norm=dyt --name .a", "does not begin with a dot, got '.a'"),
        ("--vary model.norm=dyt --seeds-at-once 0", "seeds_at_once must be at least 1"),
        (
            "--vary training.steps=600 --equal flops",
            "--equal flops chooses the steps of each variant: leave training.steps out of --vary",
        ),
        ("--vary model.norm=dyt+training.steps=600 --equal time", "leave training.steps out"),
        ("--vary 'training.steps = 600' --equal time", "leave training.steps out"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(words, said):
    assert said in str(refusal(parse_compare, shlex.split(words)))
