"""Blocks from a user's own file: named, loaded, kept out of what a run may execute."""

import copy
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from conftest import TEXT, TINY, VOCAB, run_script, tiny_run
from jaxtyping import TypeCheckError
from support.runs import save_checkpoint

from gptlite.cli import parse_sample, parse_train
from gptlite.config import Config, ModelConfig, OptimizerConfig, TrainingConfig
from gptlite.custom import (
    custom_arguments,
    custom_sources,
    load_class,
    load_custom,
    with_custom,
)
from gptlite.errors import UserError
from gptlite.machine.files import write_json
from gptlite.machine.mesh import make_mesh
from gptlite.machine.names import CustomBlock
from gptlite.models.build import make_part
from gptlite.models.gpt import GPT
from gptlite.nn import Linear, RMSNorm
from gptlite.runs.load import load
from gptlite.runs.resume import find_checkpoint
from gptlite.runs.saved_config import changed_sources, load_config, save_config
from gptlite.runs.tokenizers import make_tokenizer
from gptlite.training.step import TrainSteps

SOURCE = """
import pathlib
import equinox as eqx
from jaxtyping import Array, Float, Int

pathlib.Path("executed").write_text("")


class Twice(eqx.Module):
    def __init__(self, config, *, key):
        pass

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return 2 * x


class Times(Twice):
    def __init__(self, config, *, factor: float = 2.0, steps: "int" = 1, shape=(), key):
        self.factor = factor

    factor: float = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self.factor * x


Alias = Twice


class Halves(Twice):
    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return x[..., ::2]


class Deep(eqx.Module):
    layer: Int[Array, ""]

    def __init__(self, config, *, layer, key):
        self.layer = layer

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return x / (self.layer + 1.0)


class Wants(eqx.Module):
    def __init__(self, d_model, d_ff, *, key):
        pass
"""


@pytest.fixture
def file(tmp_path, monkeypatch, request) -> Iterator[str]:
    """A file with blocks, in the current folder, under a name that no other test has."""
    monkeypatch.chdir(tmp_path)
    name = f"blocks_{abs(hash(request.node.name))}"
    Path(f"{name}.py").write_text(SOURCE)
    yield f"{name}.py"
    forget(name)


def forget(module: str) -> None:
    """As in a new process."""
    sys.modules.pop(module, None)


def config_with(**blocks) -> Config:
    return Config(model=dataclasses.replace(TINY, **blocks))


def test_a_name_becomes_a_class_and_a_rename_custom(file, tmp_path):
    config = config_with(mlp=f"{file}:Twice")
    assert not Path("executed").exists()
    loaded = load_custom(config.model)
    assert Path("executed").exists()
    assert loaded == config.model
    assert custom_arguments(loaded) == custom_arguments(config.model) == ["--custom", file]
    save_config(dataclasses.replace(config, model=loaded), tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config
    model: Any = GPT(loaded, VOCAB, key=jax.random.key(0))
    assert type(model.stack.blocks.mlp).__name__ == "Twice"
    x = jnp.ones((2, 3))
    np.testing.assert_array_equal(model.stack.blocks.mlp(x), 2 * x)


def test_a_block_has_options_of_its_own(file):
    def scale(options):
        config = load_custom(config_with(mlp=f"{file}:Times{options}").model)
        return GPT(config, VOCAB, key=jax.random.key(0)).stack.blocks.mlp.factor  # pyright: ignore

    assert (scale(""), scale(":factor=0.5"), scale(":steps=3:factor=1")) == (2.0, 0.5, 1.0)
    for options, words in (
        (":factro=1", "has no option factro: its options are factor, steps, shape"),
        (":steps=1.5", "steps in model.mlp .* must be int, got '1.5'"),
        (":factor=x", "factor in model.mlp .* must be float, got 'x'"),
        (":shape=2", "shape in model.mlp .* must be annotated as bool, int, float or str"),
    ):
        with pytest.raises(UserError, match=words):
            scale(options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"attention": "sliding:window=0"},
            "window in model.attention sliding must be at least 1 .*got 0",
        ),
        ({"mlp": "moe:experts_per_token=5"}, "experts_per_token .* at most 4, got 5"),
        (
            {"mlp": "moe:balance_loss=nan"},
            "balance_loss in model.mlp moe must be .*, got nan",
        ),
        ({"mlp": "relu:n_experts=5"}, "model.mlp relu has no option n_experts: it has no options"),
        ({"attention": "full:qkv_bias=2"}, "qkv_bias .* must be true or false, got '2'"),
    ],
    ids=str,
)
def test_options_of_the_packages_blocks_are_checked(changes, words):
    with pytest.raises(UserError, match=words):
        GPT(config_with(**changes).model, VOCAB, key=jax.random.key(0))


def test_in_python_a_config_takes_a_class():
    class Third(eqx.Module):
        scale: jax.Array

        def __init__(self, config: ModelConfig, *, key):
            self.scale = jnp.full(config.d_model, 1 / 3)

        def __call__(self, x):
            return self.scale * x

    config = dataclasses.replace(TINY, norm=Third, mlp=Third)
    copied = copy.deepcopy(dataclasses.replace(config, dropout=0.1)).mlp
    assert isinstance(copied, CustomBlock)
    assert (copied, copied.block) == (config.mlp, Third)
    again = CustomBlock(copied, type("Third", (Third,), {}))  # as a cell that is run twice
    assert again != copied
    assert not again == copied  # noqa: SIM201 - `==` has a method of its own
    assert copied == str(copied) == again
    model: Any = GPT(config, VOCAB, key=jax.random.key(0))
    assert type(model.norm) is type(model.stack.blocks.mlp_residual.norm) is Third
    assert model.stack.blocks.mlp.scale.shape == (1, 16)
    ids = jax.ShapeDtypeStruct((5,), jnp.int32)
    assert eqx.filter_eval_shape(model, ids).shape == (5, VOCAB)


def test_annotations_in_custom_files_are_checked(file):
    block: Any = load_class(f"{file}:Halves")
    with pytest.raises(TypeCheckError, match="Halves"):
        block(TINY, key=None)(jnp.ones((2, 4)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{file}:Thrice", "no class Thrice in {file}: it has Twice, Times, Halves, Deep, Wants"),
        ("missing.py:Twice", "no file missing.py"),
        (
            "broken.py:Twice",
            r"broken.py cannot be loaded: SyntaxError: .*\(--debug shows where\)",
        ),
        ("my.own.py:Twice", "Python imports no file with a dot in its name before .py"),
        ("json.py:Twice", "a module json is loaded already; rename it"),
        ("{file}:Alias", "Alias in {file} is another name for {file}:Twice"),
    ],
)
def test_what_cannot_be_loaded_is_said(file, name, words):
    Path("broken.py").write_text("class Twice(:")
    for path in ("json.py", "my.own.py"):
        Path(path).write_text(SOURCE)
    with pytest.raises(UserError, match=words.format(file=file)):
        load_custom(config_with(mlp=name.format(file=file)).model)


@pytest.mark.parametrize("folder", ["mine/custom", "mine/custom/deeper", "mine"])
def test_nothing_in_the_folder_of_a_run_is_executed(file, tmp_path, folder):
    """Whatever the run has besides its config, and whatever links lead into it or out of it."""
    (tmp_path / folder).mkdir(parents=True)
    copied = tmp_path / folder / file
    copied.write_text(SOURCE)
    save_config(Config(), tmp_path / "mine" / "config.json")
    (tmp_path / "link.py").symlink_to(copied)
    (tmp_path / folder / "out.py").symlink_to(tmp_path / file)
    (tmp_path / "mine" / "folder").symlink_to(tmp_path)
    for name in (copied, "link.py", f"{folder}/out.py", f"mine/folder/{file}"):
        with pytest.raises(UserError, match="in the folder of a run, from which nothing is exec"):
            load_custom(config_with(mlp=f"{name}:Twice").model)
    assert not list(tmp_path.rglob("executed"))


def test_a_compiled_file_beside_the_source_is_not_executed(file, tmp_path, monkeypatch):
    """Its name is known, and with a flag Python does not compare it with the source."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    stem = file.removesuffix(".py")
    Path(file).write_text("open('planted', 'w')")
    sys.path.insert(0, str(tmp_path))
    with jaxtyping.install_import_hook(stem, "gptlite.machine.typecheck.checked"):
        importlib.import_module(stem)
    sys.path.remove(str(tmp_path))
    forget(stem)
    Path("planted").unlink()
    Path(file).write_text(SOURCE)
    (compiled,) = Path("__pycache__").glob(f"{stem}.*.pyc")
    content = bytearray(compiled.read_bytes())
    content[4] = 1  # PEP 552: a hash that is not checked
    compiled.write_bytes(content)
    load_custom(config_with(mlp=f"{file}:Twice").model)
    assert not Path("planted").exists()
    assert compiled.read_bytes() == content


@pytest.mark.parametrize("name", ["a" * 300 + ".py", "loop.py", "absent.py"])
def test_a_path_that_leads_nowhere_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").symlink_to("loop.py")
    with pytest.raises(UserError, match=r"There is no file .* with the class X"):
        load_custom(config_with(mlp=f"{name}:X").model)


def test_a_class_with_another_signature_is_refused(file):
    with pytest.raises(UserError, match=r"must be built from \(config, \*, key\).*d_ff"):
        load_custom(config_with(attention=f"{file}:Wants").model)
    for block in (int, Linear):  # the class itself
        with pytest.raises(UserError, match=r"must be built from \(config, \*, key\)"):
            ModelConfig(mlp=block)
    with pytest.raises(UserError, match=r"must be one of rms, .* that has been loaded"):
        GPT(config_with(norm=f"{file}:Twice").model, VOCAB, key=jax.random.key(0))


@pytest.fixture
def run(file, tmp_path) -> Path:
    """A run that was made with `Twice`, and that has not been loaded in this process."""
    path = tmp_path / "runs" / "mine"
    (path / "custom").mkdir(parents=True)
    config = config_with(mlp=f"{file}:Twice")
    tokenizer = make_tokenizer("byte")
    model = GPT(load_custom(config.model), tokenizer.vocab_size, key=jax.random.key(0))
    save_config(config, path / "config.json")
    (path / "custom" / file).write_text(SOURCE)
    write_json(path / "tokenizer.json", tokenizer.to_json())
    save_checkpoint(path, model)
    forget(file.removesuffix(".py"))
    Path("executed").unlink()
    return path


def test_loading_a_run_executes_no_custom_code(run, file):
    Path("other.py").write_text("class Thrice:\n    pass\n")
    made = f"{run} cannot be loaded. The run was made with {file}:Twice, .* that class: --custom"
    with pytest.raises(UserError, match=made):
        load(run)
    with pytest.raises(UserError, match=r"with that class.* is the newest run: --run NAME, in"):
        load()
    with pytest.raises(UserError, match=r"with that class \(there is none in other\.py\)"):
        load(run, custom=["other.py"])
    for words in (
        ["--resume", str(run)],
        ["--init-from", str(run)],
        ["--resume", str(run), "--model.mlp", "relu"],
        ["--resume", str(run), "--model.mlp", f"{file}:Twice"],
        ["--resume", str(run), "--custom", "other.py"],
    ):
        with pytest.raises(UserError, match="executed only if the command names a file"):
            parse_train(words)
    assert not Path("executed").exists()


def test_a_run_is_loaded_with_the_file_that_is_named(run, file):
    arguments = parse_sample(["--run", str(run), "--custom", file])
    loaded = load(arguments.run, custom=arguments.custom)
    assert Path("executed").exists()
    model: Any = loaded.model
    assert type(model.stack.blocks.mlp).__name__ == "Twice"
    resumed = parse_train(["--resume", str(run), f"--custom={file}", "--data.corpus=pydoc"])
    assert resumed.config.model == config_with(mlp=f"{file}:Twice").model
    begun = parse_train(["--init-from", str(run), f"--custom={file}"])
    assert begun.config.model == resumed.config.model
    with pytest.raises(
        UserError, match=r"may not change on --resume: model.mlp \(.*, got 'relu'\)"
    ):
        parse_train(["--resume", str(run), f"--custom={file}", "--model.mlp", "relu"])


def test_the_file_of_a_run_may_be_elsewhere_or_a_class(run, file):
    Path("elsewhere").mkdir()
    moved = Path("elsewhere") / "moved.py"
    Path(file).rename(moved)
    loaded = load(run, custom=[str(moved)])
    assert loaded.config.model.mlp == f"{moved}:Twice"
    forget("moved")
    block = load_class(f"{moved}:Twice")
    model: Any = load(run, custom=[block]).model
    assert type(model.stack.blocks.mlp) is block
    forget("moved")


def test_a_class_alone_is_found_in_the_files_that_are_named(file):
    Path("other.py").write_text("class Twice:\n    pass\n")
    config = config_with(mlp="Times:factor=3", norm="Twice")
    found = with_custom(config, [file, f"./{file}"]).model
    assert found == with_custom(config, file).model == with_custom(config, [Path(file)]).model
    assert (found.mlp, found.norm) == (f"{file}:Times:factor=3", f"{file}:Twice")
    parsed = parse_train(["--custom", file, "--model.mlp", "Twice"])
    assert parsed.config.model.mlp == f"{file}:Twice"
    for mlp, custom, words in (
        ("Twice", [], "no class Twice for model.mlp: name it as FILE.py:Twice, or give its file"),
        ("Times", ["other.py"], r"no class Times for model.mlp in other\.py: it has Twice"),
        ("Twice", [file, "other.py"], f"several classes Twice: {file}:Twice, other.py:Twice"),
        ("Twice", ["absent.py"], "--custom absent.py cannot be read as a file of Python"),
    ):
        with pytest.raises(UserError, match=words):
            with_custom(config_with(mlp=mlp), custom)
    with pytest.raises(UserError, match=r"--custom absent\.py cannot be read"):
        with_custom(config_with(), ["absent.py"])  # not needed, and mistyped
    Path("nested.py").write_text("if True:\n    class Once:\n        pass\n")
    assert with_custom(config_with(mlp="Once"), "nested.py").model.mlp == "nested.py:Once"
    with pytest.raises(UserError, match=r"no class Twice for a block: name it as FILE\.py"):
        load_custom(config_with(norm="Twice").model)
    assert not Path("executed").exists()


def test_a_file_that_has_changed_is_said(run, file, capsys):
    Path(file).write_text(SOURCE + "\n\nMORE = 1\n")
    loaded = load(run, custom=[file])
    wanted = f"{file} has changed since {run} began, so the weights may not fit"
    assert wanted in capsys.readouterr().out
    # Where it is resumed, too, and before its arrays are found to be of another shape.
    other = GPT(config_with(d_model=8).model, loaded.tokenizer.vocab_size, key=jax.random.key(0))
    steps = TrainSteps(other, OptimizerConfig(name="adamw"), TrainingConfig(), make_mesh())
    with pytest.raises(UserError, match="No checkpoint in"):
        find_checkpoint(run, steps.abstract_state(other), loaded.config, "")
    assert wanted in capsys.readouterr().out.partition("Looking for an older checkpoint")[0]
    assert list(custom_sources(loaded.config.model)) == [file]
    assert changed_sources(run / "nothing", loaded.config.model) == []


def test_the_source_of_a_block_is_what_was_executed(file):
    """An editor may write the file while a model is trained, or between two cells of a notebook."""
    named = ModelConfig(mlp=f"{file}:Twice")
    before = load_custom(named)
    edited = SOURCE.replace("2 * x", "3 * x")
    Path(file).write_text(edited)
    assert custom_sources(before) == {file: SOURCE.encode()}
    after = load_custom(named)
    assert custom_sources(after) == {file: edited.encode()}
    assert custom_sources(before) == {file: SOURCE.encode()}
    first, second, third = (x.mlp for x in (before, after, load_custom(named)))
    assert all(isinstance(x, CustomBlock) for x in (first, second, third))
    assert first != second == third
    blocks: list[Any] = [x.block for x in (first, second) if isinstance(x, CustomBlock)]
    assert [float(block(TINY, key=None)(jnp.ones((1, 1)))[0, 0]) for block in blocks] == [2, 3]


def test_a_config_without_custom_blocks_is_not_changed():
    assert with_custom(Config(), [], read=True) == Config()
    assert type(GPT(TINY, VOCAB, key=jax.random.key(0)).norm) is RMSNorm


@pytest.mark.parametrize("block", ["pre", "post", "sandwich", "parallel"])
@pytest.mark.parametrize("stack", ["unrolled", "scan"])
def test_a_class_that_takes_it_is_given_the_number_of_its_layer(file, block, stack):
    config = config_with(mlp=f"{file}:Deep", norm=f"{file}:Deep", block=block, stack=stack)
    config = load_custom(dataclasses.replace(config.model, n_layers=3))
    model: Any = GPT(config, VOCAB, key=jax.random.key(0))
    layers = [part.layer for part in modules_of(model, "Deep")]
    assert [layer.tolist() for layer in layers[:-1]] == [[0, 1, 2]] * (len(layers) - 1)
    assert layers[-1].tolist() == 3  # the final norm is after all of them
    # They differ in what they compute, and not only in their numbers.
    same = eqx.tree_at(lambda it: it.stack.blocks.mlp.layer, model, jnp.zeros(3, int))
    ids = jnp.arange(6)
    one, other = (np.asarray(it.hidden(ids)[0]) for it in (model, same))
    assert np.abs(one - other).max() > 0.01
    with pytest.raises(UserError, match="has no option layer"):
        make_part(
            "mlp", load_custom(config_with(mlp=f"{file}:Deep:layer=1").model), jax.random.key(0)
        )
    with pytest.raises(TypeError, match="'layer'"):  # by a block that does not hand it on
        make_part("mlp", config, jax.random.key(0))


def modules_of(tree: Any, name: str) -> list[Any]:
    def is_one(node):
        return type(node).__name__ == name

    return [node for node in jax.tree.leaves(tree, is_leaf=is_one) if is_one(node)]


def test_a_run_with_numbered_layers_is_trained_resumed_and_loaded(file):
    Path("text.txt").write_text(TEXT)
    words = [*tiny_run(), "--model.mlp", f"{file}:Deep", "--run", "deep", "--model.n-layers", "2"]
    first = run_script("train.py", *words, folder=Path())
    assert (first.code, first.err) == (0, "")
    assert f"{file}:Deep: parameters, shapes, causal hold" in first.out
    more = ["--resume", "deep", "--custom", file, "--data.corpus", "text.txt"]
    assert run_script("train.py", *more, "--training.steps", "12", folder=Path()).code == 0
    model: Any = load("deep", custom=[file]).model
    (layer,) = (part.layer for part in modules_of(model, "Deep"))
    assert layer.tolist() == [0, 1]
