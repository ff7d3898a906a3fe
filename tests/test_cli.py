"""Every knob and flag with values that it should not have; every kind of text that is none."""

import dataclasses
import functools
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from conftest import ROOT, TEXT, refusal
from hypothesis import given, settings, strategies as st

from gptlite.cli import LogConfig, SampleArguments, TrainArguments, parse_sample, parse_train
from gptlite.config import Config, OptimizerConfig, SamplingConfig, TrainingConfig
from gptlite.errors import UserError
from gptlite.machine.fields import check_value
from gptlite.machine.names import BlockNames
from gptlite.machine.processes import DistributedConfig
from gptlite.scripts import sample, train

TINY = [
    "--model.n-layers=1",
    "--model.n-heads=2",
    "--model.d-model=16",
    "--model.context-length=16",
    "--training.batch-size=4",
    "--training.steps=2",
    "--training.sample-tokens=0",
]


@pytest.fixture(scope="module", autouse=True)
def sources_are_read_once():
    """tyro reads config.py anew at every parse, which takes a third of the time of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "getsourcelines", functools.cache(inspect.getsourcelines))
        yield


SECTIONS = get_type_hints(Config) | {"distributed": DistributedConfig, "log": LogConfig}


def knobs() -> Iterator[tuple[str, Any]]:
    """Every setting in a section of train.py's command line as its flag, with its type."""
    for section, kind in SECTIONS.items():
        for name, hint in get_type_hints(kind, include_extras=True).items():
            if name != "init_from":  # which is set by --init-from
                yield f"--{section}.{name.replace('_', '-')}", hint


def plain(kind: type, leave_out: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Every other flag of a script, with its type."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name not in leave_out:
            yield f"--{name.replace('_', '-')}", hint


def choices_of(hint: Any) -> tuple[str, ...]:
    """Of a choice, or of a choice of blocks."""
    plain = hint.__origin__ if get_origin(hint) is Annotated else hint
    return get_args(plain) if get_origin(plain) is Literal else hint.__metadata__[0].names


def is_block(hint: Any) -> bool:
    return get_origin(hint) is Annotated and isinstance(hint.__metadata__[0], BlockNames)


def kinds_of(hint: Any) -> set[Any]:
    if is_block(hint):
        return {Literal}
    if get_origin(hint) is Annotated:
        hint = hint.__origin__
    return {Literal} if get_origin(hint) is Literal else set(get_args(hint)) or {hint}


# Values that no knob of the type takes, first those at the ends of its range. Texts may be
# anything; what they name is tested below.
WRONG: dict[Any, list[str]] = {
    int: ["-1", "2147483648", "9" * 400, "1.5", "nan", "inf", "", "many", "0x10", "1_0 0"],
    float: ["-1", "nan", "1e39", "inf", "-inf", "1e999", "", "many", "1,5"],
    Literal: ["", "nonsense", "NaN", "🙂", "rms,layer", "file.py", "file.py:", ":Class", "a.py:1"],
    bool: ["maybe", "", "2"],
}
LEFT_OUT = ("config", "preset", "distributed", "log", "began")
TRAIN = dict([*knobs(), *plain(TrainArguments, LEFT_OUT)])
SAMPLE = dict([*plain(SampleArguments, ("sampling",)), *plain(SamplingConfig, ())])


FLAGS = TRAIN | SAMPLE


def wrong_values(flags: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Each flag with the first three of them, for its own range, and one of each type with the
    others; and whether its words have to be parsed, as those of each type and names of blocks."""
    seen = set()
    for flag, hint in flags.items():
        for kind in (bool, int, float, Literal):
            if kind in kinds_of(hint):
                type_of = kind, get_origin(hint) is Annotated
                for value in WRONG[kind][: 3 if type_of in seen else None]:
                    if not ("--mesh." in flag and value == "-1"):  # what the others leave
                        yield flag, value, type_of not in seen or is_block(hint)
                seen.add(type_of)
                break


WORDS = [case[:2] for case in wrong_values(TRAIN) if case[2] or "." not in case[0]]
RANGES = [case[:2] for case in wrong_values(TRAIN) if case[:2] not in WORDS]


@pytest.mark.parametrize(("flag", "value"), WORDS)
def test_a_knob_of_each_type_refuses_words_that_are_no_value(flag, value):
    sentence = str(refusal(parse_train, [f"{flag}={value}"]))
    name = flag.removeprefix("--")
    # After a flag that takes no value, tyro takes the value for another word, and names only that.
    is_bool = bool in kinds_of(FLAGS[flag])
    assert is_bool or name in sentence or name.replace("-", "_") in sentence, sentence


@pytest.mark.parametrize(("flag", "word"), RANGES)
def test_every_knob_of_training_refuses_what_is_out_of_its_range(flag, word):
    """As the config is made: to parse the words of each takes as long as to try all."""
    section, name = flag.removeprefix("--").replace("-", "_").split(".")
    kind = next((kind for kind in (int, float) if kind in kinds_of(TRAIN[flag])), str)
    with pytest.raises(UserError, match=name):
        SECTIONS[section](**{name: kind(word)})


def test_a_whole_number_in_place_of_a_fraction_is_one():
    """JAX has no integers as large as a rate of learning may be."""
    config = OptimizerConfig(learning_rate=2**63, clip_norm=1)
    for value, wanted in ((config.learning_rate, 2.0**63), (config.clip_norm, 1.0)):
        assert (type(value), value) == (float, wanted)
    assert type(SamplingConfig(top_k=3, temperature=1).top_k) is int
    for size in (10**400, -(10**400)):
        with pytest.raises(UserError, match=r"x must be at least -3\.4e\+38"):
            check_value("x", size, float | None)


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e39, math.inf, math.nan])
def test_a_number_that_is_not_in_float32_is_refused(value):
    """A file of JSON may hold a whole number of any size where a fraction belongs."""
    with pytest.raises(UserError, match=r"optimizer\.learning_rate must be"):
        OptimizerConfig(learning_rate=value)
    with pytest.raises(UserError, match=r"save_seconds must be"):
        TrainingConfig(save_seconds=value)


@pytest.mark.parametrize(("flag", "value"), [case[:2] for case in wrong_values(SAMPLE)])
def test_every_flag_of_sampling_refuses_what_is_out_of_its_range(flag, value):
    sentence = str(refusal(parse_sample, ["--prompt=x", f"{flag}={value}"]))
    name = flag.removeprefix("--")
    # After a flag that takes no value, tyro takes the value for another word, and names only that.
    is_bool = bool in kinds_of(FLAGS[flag])
    assert is_bool or name in sentence or name.replace("-", "_") in sentence, sentence


def test_every_option_has_a_test_of_its_range():
    fields = [len(dataclasses.fields(kind)) for kind in SECTIONS.values()]
    assert len(list(knobs())) == sum(fields) - 1
    texts = {flag for flag, hint in (TRAIN | SAMPLE).items() if not set(WRONG) & kinds_of(hint)}
    assert texts == {
        "--data.corpus", "--data.tokenizer", "--run", "--resume", "--init-from", "--prompt",
        "--prompt-file", "--stop", "--custom", "--distributed.coordinator",
        "--log.to", "--model.attention-every", "--model.lora", "--training.freeze",
    }  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["--training.steps"],
        ["--absent", "3"],
        ["quick", "s"],
        ["-x"],
        [""],
        ["--resume"],
        ["--log.to", "mlflow"],
        ["--log.to", "wandb,wandb"],
        ["--log.to", "wandb, trackio"],
    ],
)
def test_unknown_arguments_are_refused(words):
    assert len(str(refusal(parse_train, words))) > 20


@pytest.mark.processes
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_errors_of_the_command_line_are_shown_on_any_terminal(encoding):
    for words, said in (
        ("--training.steps many", "invalid literal"),
        ("--trainig.keep", "--training.keep"),
        ("--training.keep 0", "must be at least 1"),
    ):
        done = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *words.split()],
            capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": encoding},
        )  # fmt: skip
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr


# -- texts ---------------------------------------------------------------------------------------


def make_texts(folder: Path) -> None:
    for name, content in {
        "empty.txt": b"",
        "mark.txt": b"\xef\xbb\xbf",
        "short.txt": b"shorter than a context",
        "same.txt": b"a" * 5000,
        "latin.txt": b"caf\xe9 " * 100,
        "far.txt": b"fine " * 500_000 + b"\xff",
        "cut.txt": b"fine " * 500 + "é".encode()[:1],
        "wide.txt": "wide ".encode("utf-16") * 100,
        "binary.txt": bytes(range(128)) * 50,
        "secret.txt": b"text " * 100,
    }.items():
        (folder / name).write_bytes(content)
    (folder / "dangling.txt").symlink_to(folder / "nowhere.txt")
    (folder / "none").mkdir()
    (folder / "none" / "notes.md").write_text("not a .txt")
    (folder / "mixed").mkdir()
    (folder / "mixed" / "a.txt").write_text(TEXT)
    (folder / "mixed" / "b.txt").write_bytes(b"\xff")
    (folder / "broken").mkdir()
    (folder / "broken" / "a.txt").symlink_to(folder / "nowhere.txt")
    os.mkfifo(folder / "pipe.txt")
    (folder / "pipes").mkdir()
    os.mkfifo(folder / "pipes" / "a.txt")


@pytest.mark.parametrize(
    ("corpus", "words"),
    [
        ("empty.txt", "empty.txt is empty"),
        ("mark.txt", "mark.txt is empty"),
        ("short.txt", "too short"),
        ("same.txt", "'a', 5,000 times"),
        ("latin.txt", "not UTF-8 text: byte 3 is 0xe9"),
        ("far.txt", "not UTF-8 text: byte 2500000 is 0xff"),
        ("cut.txt", "not UTF-8 text: byte 2500 is 0xc3"),
        ("wide.txt", "is UTF-16 text"),
        ("binary.txt", "not text: byte 0 is 0x00"),
        ("dangling.txt", "no corpus dangling.txt"),
        ("none", "no .txt file in it"),
        ("mixed", "b.txt is not UTF-8 text: byte 0 is 0xff"),
        ("broken", "a.txt is not a regular file"),
        ("pipe.txt", "not a regular file"),
        ("pipes", "a.txt is not a regular file"),
        ("absent.txt", "no corpus absent.txt"),
        ("", "name of the corpus is empty"),
        ("hf:", "is named hf:NAME"),
    ],
)
def test_a_corpus_that_is_no_text_is_refused(corpus, words, tmp_path, monkeypatch, capsys):
    make_texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", f"--data.corpus={corpus}", *TINY, "--run", "x"])
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") <= 2
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("one\r\ntwo\r\n" * 40, "one\r\ntwo\r\n" * 40),
        ("\ufeffone two\n" * 1 + "three\n" * 60, "one two\n" + "three\n" * 60),
        ("e\u0301 🙂👨‍👩‍👧 \u200f\n" * 30, "e\u0301 🙂👨‍👩‍👧 \u200f\n" * 30),
        ("x" * (2**20 - 1) + "🙂" * 3, "x" * (2**20 - 1) + "🙂" * 3),  # across two reads
    ],
    ids=["crlf", "mark", "combining", "pieces"],
)
def test_odd_but_proper_text_is_taken_as_it_is(text, kept, tmp_path):
    from gptlite.runs.corpora import load_corpus

    (tmp_path / "a.txt").write_bytes(text.encode())
    corpus = load_corpus(str(tmp_path / "a.txt"))
    assert corpus.text == kept
    assert corpus.characters == len(kept)
    assert corpus.alphabet == "".join(sorted(set(kept)))


def test_debug_shows_where_an_error_came_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for script, words in ((train, ["--data.corpus", "absent"]), (sample, ["--prompt", "x"])):
        for debug in ([], ["--debug"]):
            monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *words, *debug])
            with pytest.raises(SystemExit) as stop:
                script.main()
            assert stop.value.code == 2
            error = capsys.readouterr().err
            assert ("Traceback" in error) == bool(debug)
            assert error.splitlines()[-1].startswith("error: ")


# -- any config ------------------------------------------------------------------------------------

ANY_WORDS = st.one_of(
    st.integers(-3, 70).map(str),
    st.floats(0, 1).map(str),
    st.floats().map(str),
    st.text(max_size=6),
    st.sampled_from(["None", "True", "quick", "1e-3", "2147483647", "1", "2", "8", "64"]),
)


def words_for(flag: str, hint: Any) -> st.SearchStrategy[str]:
    """A flag with a value: mostly one of its type."""
    kinds = kinds_of(hint)
    if kinds == {Literal}:
        return st.sampled_from([*choices_of(hint), "nonsense"]).map(lambda v: f"{flag}={v}")
    if kinds == {bool}:
        return st.sampled_from([flag, flag.replace(".", ".no-", 1), f"{flag}=x"])
    return ANY_WORDS.map(lambda value: f"{flag}={value}")


CONFIGS = st.lists(
    st.sampled_from(list(knobs())).flatmap(lambda knob: words_for(*knob)), min_size=1, max_size=4
)


@pytest.mark.processes
@settings(max_examples=120)
@given(CONFIGS)
def test_any_config_is_accepted_or_refused_with_a_sentence(words):
    said = refusal(parse_train, words)
    assert said is None or len(said) > 20


def accepted() -> list[str]:
    """A valid value of every choice."""
    choices = [
        [f"{flag}={value}" for value in choices_of(hint)]
        for flag, hint in knobs()
        if kinds_of(hint) == {Literal}
    ]
    choices += [["--model.bias", "--model.no-bias"], ["--model.tied-head", "--model.no-qk-norm"]]
    choices += [["--model.dropout=0.5", "--model.attention-dropout=0.5"], ["--training.keep=1"]]
    return [choice[0] for choice in choices]


def test_a_config_of_accepted_values_trains(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    train.train(parse_train([*TINY, "--data.corpus=text.txt", "--run=x", *accepted()]))
    assert (tmp_path / "runs" / "x" / "result.json").exists()


@pytest.mark.processes
def test_running_out_of_memory_is_reported(tmp_path):
    """XLA's own error, from a real allocation that fails."""
    program = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (24 * 2**30, 24 * 2**30))
sys.argv = ["train.py", *{TINY!r}, "--data.corpus", "text.txt", "--model.d-model", "16384",
    "--model.d-ff", "1000000", "--run", "x"]
import gptlite.machine.memory
gptlite.machine.memory.free_memory = lambda: 2**50
from gptlite.scripts import train
train.main()
"""
    (tmp_path / "text.txt").write_text(TEXT)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "does not fit into memory" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("character", ["\x1b[2J", "\u202e", "\x9b", "\n", "\u2028"])
@pytest.mark.parametrize(
    "field", ["data.corpus", "data.tokenizer", "model.norm", "model.lora", "training.freeze"]
)
def test_a_config_of_a_stranger_has_no_control_characters(tmp_path, field, character, capsys):
    """So that nothing that prints a config need ask: --help of a run that is resumed does."""
    section, name = field.split(".")
    record = dataclasses.asdict(Config())
    record[section][name] = f"a{character}b"
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(UserError) as error:
        parse_train(["--resume", str(tmp_path), "--help"])
    assert field in str(error.value)
    assert character not in capsys.readouterr().out
