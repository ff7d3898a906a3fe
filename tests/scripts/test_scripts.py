"""The two commands, as a person types them."""

import functools
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from conftest import ROOT, TEXT, run_script
from support.runs import weights

import gptlite
from gptlite.cli import exit_on_error, parse_sample, parse_train, parse_words
from gptlite.errors import UserError
from gptlite.generation.text import TextStream
from gptlite.machine.progress import log
from gptlite.machine.pytrees import count_parameters
from gptlite.presets import PRESETS
from gptlite.runs.load import load
from gptlite.scripts import sample, train
from gptlite.scripts.estimate import estimate, parse_estimate

TINY = [
    "--model.n-layers",
    "1",
    "--model.n-heads",
    "2",
    "--model.d-model",
    "16",
    "--model.context-length",
    "16",
    "--training.batch-size",
    "4",
    "--training.steps",
    "30",
    "--training.eval-every",
    "20",
    "--training.log-every",
    "10",
    "--training.sample-tokens",
    "20",
    "--optimizer.name",
    "adamw",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a text and one finished run of it."""
    path = tmp_path_factory.mktemp("place")
    (path / "rhyme.txt").write_text(TEXT, encoding="utf-8")
    words = ["--data.corpus", "rhyme.txt", "--run", "one", *TINY]
    done = run_script("train.py", "quick", *words, folder=path)
    assert done.code == 0, done.err
    (path / "train.log").write_text(done.out)
    return path


@pytest.mark.processes
def test_a_process_of_its_own_writes_and_says_the_same(place, tmp_path):
    (tmp_path / "rhyme.txt").write_text(TEXT, encoding="utf-8")
    words = ["--data.corpus", "rhyme.txt", "--run", "one", *TINY]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "quick", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # What is left is told only where it is seconds, on a slow machine.
    times = r"  \d+ s left|\d[\d,.]*k? (tokens/s|s\b)"
    said = [re.sub(times, "", text) for text in (done.stdout, (place / "train.log").read_text())]
    assert said[0] == said[1]
    found, expected = (weights(folder / "runs" / "one") for folder in (tmp_path, place))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_text_in_a_file_of_ids_is_trained_on_and_sampled_from(tmp_path, monkeypatch):
    (tmp_path / "rhyme.txt").write_text(TEXT, encoding="utf-8")
    mapped = functools.partial(gptlite.split_corpus, in_memory=0, folder=tmp_path / "tokens")
    monkeypatch.setattr(gptlite, "split_corpus", mapped)
    words = ["--data.corpus", "rhyme.txt", "--run", "mapped", *TINY]
    done = run_script("train.py", *words, folder=tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("    | ") >= 2
    assert len(list((tmp_path / "tokens").glob("*.train"))) == 1


def test_training_writes_every_file_of_a_run(place):
    run = place / "runs" / "one"
    assert {path.name for path in run.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "metrics.jsonl",
        "checkpoints",
        "loss.png",
        "result.json",
    }
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [10, 20, 30]
    result = json.loads((run / "result.json").read_text())
    evaluated = [record["val_loss"] for record in records if "val_loss" in record]
    assert result["best_val_loss"] == min(evaluated)
    assert result["final_val_loss"] == evaluated[-1]
    assert result["steps"] == 30
    assert result["tokens"] == 30 * 4 * 16
    assert result["corpus"] == "rhyme.txt"
    assert result["corpus_characters"] == len(TEXT)
    assert result["total_seconds"] > 0
    assert {"val_bits_per_byte", "parameters", "tokens_per_second", "corpus_sha256", "seed"} <= set(
        result
    )
    assert (run / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_piped_output_is_plain_lines_that_end_with_the_next_command(place):
    log = (place / "train.log").read_text()
    assert "\r" not in log
    assert "\x1b" not in log
    for words in ("step 20/30", "validation loss", "    | ", "best validation loss"):
        assert words in log
    last = log.strip().splitlines()[-1].strip()
    assert last == "gptlite sample --run runs/one --prompt=The"


def test_sampling_writes_the_text_and_nothing_else_and_the_same_again(place):
    words = ("--prompt", "The miller", "--max-new-tokens", "40", "--top-k", "5", "--seed", "3")
    first = run_script("sample.py", *words, folder=place)
    assert first.code == 0, first.err
    assert len(first.out) == 40 + 1
    assert set(first.out) <= set(TEXT)
    assert first.err == ""
    again = run_script("sample.py", "--run", "one", *words[2:], folder=place, stdin="The miller")
    assert again.out == first.out
    (place / "prompt.txt").write_text("The miller")
    third = run_script(
        "sample.py", "--run", "runs/one", "--prompt-file", "prompt.txt", "--num-samples", "2",
        *words[2:], folder=place,
    )  # fmt: skip
    samples = third.out.split("\n---\n")
    assert len(samples) == 2
    assert samples[0] + "\n" == first.out
    assert samples[1] != samples[0]


def test_a_stop_string_ends_the_text(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    arguments = ["--prompt", "The", "--max-new-tokens", "200", "--greedy"]
    sample.sample(parse_sample(arguments))
    whole = capsys.readouterr().out
    stop = whole[20:22]
    sample.sample(parse_sample([*arguments, "--stop", stop]))
    assert capsys.readouterr().out == whole[: whole.index(stop)] + "\n"
    sample.sample(parse_sample([*arguments, "--stop", stop, "--stop", whole[10:12]]))
    ends = min(whole.index(stop), whole.index(whole[10:12]))
    assert capsys.readouterr().out == whole[:ends] + "\n"


def test_of_a_long_prompt_the_end_is_read(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    text = TEXT[:40]
    sample.sample(parse_sample(["--prompt", text[-16:]]))
    wanted = capsys.readouterr().out
    sample.sample(parse_sample(["--prompt", text]))
    found = capsys.readouterr()
    assert found.out == wanted
    assert "the prompt has 40 tokens: the model reads the last 16" in found.err


def test_a_byte_order_mark_is_no_part_of_a_prompt(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    (place / "mark.txt").write_bytes(b"\xef\xbb\xbfThe")
    sample.sample(parse_sample(["--prompt-file", "mark.txt"]))
    found = capsys.readouterr().out
    sample.sample(parse_sample(["--prompt", "The"]))
    assert capsys.readouterr().out == found


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_control_characters_from_a_model(place, monkeypatch):
    """A file or a pipe gets what was generated."""
    monkeypatch.chdir(place)
    hostile = "\x1b]0;title\x07\x9b2Jé\n"
    monkeypatch.setattr(TextStream, "feed", lambda self, ids: hostile)
    for out, shown in ((io.StringIO(), hostile), (Terminal(), r"\x1b]0;title\x07\x9b2Jé" + "\n")):
        monkeypatch.setattr(sys, "stdout", out)
        sample.sample(parse_sample(["--prompt", "The", "--max-new-tokens", "1"]))
        assert out.getvalue() == shown + "\n"


def test_messages_have_no_control_characters(capsys):
    log("a\x1b[2J\tb\u202e\udc80\r\nc")
    with pytest.raises(SystemExit), exit_on_error(debug=True):
        raise UserError("no \x1b[31mfile")
    found = capsys.readouterr()
    assert found.out == "a\\x1b[2J\tb\\u202e\\udc80\\r\nc\n"
    assert "error: no \\x1b[31mfile" in found.err
    assert "\x1b" not in found.err


def test_the_message_of_an_error_has_no_control_characters():
    """Python shows it, too."""
    assert str(UserError("weights hold \x1b[31mx")) == r"weights hold \x1b[31mx"


def test_a_control_character_in_an_argument_is_repeated_as_an_escape(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for script in (sample, train):
        code, error = run_main(script, ["--seed\x1b[2J=1", "\x1b[2J"], monkeypatch, capsys)
        assert code == 2
        assert "\x1b[2J" not in error
        assert r"\x1b[2J" in error
    sample.sample(parse_sample(["--prompt", "The", "--stop", "\x07", "--max-new-tokens", "2"]))


def test_a_function_is_called_once_for_its_words():
    def main(folder: Annotated[str, tyro.conf.Positional], *, times: int = 1) -> None:
        called.append((folder, times))

    called: list[tuple[str, int]] = []
    parse_words(main, ["a\x1bb", "--times=2"])
    assert called == [("a\x1bb", 2)]


def test_a_prompt_file_keeps_its_line_ends(place, monkeypatch, capsys):
    (place / "crlf.txt").write_bytes(b"The\r\n")
    code, error = run_main(
        sample, ["--prompt-file", str(place / "crlf.txt"), "--run", str(place / "runs" / "one")],
        monkeypatch, capsys,
    )  # fmt: skip
    assert code == 2
    assert "'\\r' (U+000D) in 'The\\r\\n'" in error


def test_a_prompt_in_another_encoding_is_told_as_a_text_is(place, monkeypatch, capsys):
    (place / "latin.txt").write_bytes("café".encode("latin-1"))
    code, error = run_main(
        sample, ["--prompt-file", str(place / "latin.txt"), "--run", str(place / "runs" / "one")],
        monkeypatch, capsys,
    )  # fmt: skip
    assert code == 2
    assert "latin.txt is not UTF-8 text: byte 3 is 0xe9. If it is in another encoding" in error


def test_ctrl_c_and_a_reader_that_has_gone_end_quietly(monkeypatch, capfd):
    for error, code in ((KeyboardInterrupt, 130), (MemoryError, 2)):
        with pytest.raises(SystemExit) as stop, exit_on_error():
            raise error
        assert stop.value.code == code
        assert capfd.readouterr().err.count("\n") <= 2
    program = "from gptlite.cli import exit_on_error as e\nwith e():\n  print('x' * 100000)"
    done = subprocess.run(
        f"{sys.executable} -c \"$PROGRAM\" | true; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", env={**os.environ, "PROGRAM": program},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.processes
@pytest.mark.parametrize("streams", [">&-", "2>&-", ">/dev/full", ">&- 2>&-"])
@pytest.mark.parametrize("words", ["--prompt The --max-new-tokens 3", "--help"])
def test_standard_output_may_be_closed_or_full(place, words, streams):
    done = subprocess.run(
        f"{sys.executable} {ROOT}/sample.py {words} {streams}",
        shell=True, cwd=place, capture_output=True, text=True,
    )  # fmt: skip
    full = "full" in streams
    assert done.returncode == (2 if full else 0)
    assert done.stderr == ("error: [Errno 28] No space left on device.\n" if full else "")
    assert (done.stdout != "") == (streams == "2>&-")


def test_a_long_message_is_cut(capsys):
    with pytest.raises(SystemExit), exit_on_error():
        raise UserError("x" * 10**6)
    assert len(capsys.readouterr().err) < 5000


def run_main(script, argv, monkeypatch, capsys) -> tuple[object, str]:
    """Exit code and standard error of a script's main, in this process."""
    monkeypatch.setattr(sys, "argv", [script.__name__ + ".py", *argv])
    with pytest.raises(SystemExit) as stop:
        script.main()
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "The 🙂"], "U+1F642"),
        (["--prompt", "T", "--temperature", "-1"], "temperature must be"),
        (["--prompt", "T", "--stop", ""], "--stop takes a text, got none"),
        (["--prompt", "T", "--top-p", "0"], "top_p must be"),
        (["--prompt", "T", "--top-k", "-1"], "top_k must be"),
        (["--prompt", "T", "--min-p", "2"], "min_p must be"),
        (["--prompt", "T", "--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--prompt", "T", "--num-samples", "-2"], "num_samples must be"),
        (["--prompt", "T", "--seed", "-1"], "seed must be"),
        (
            ["--prompt", "T", "--run", "absent"],
            "There is no run absent: no absent/config.json and no runs/",
        ),
        (["--prompt-file", "absent.txt"], "absent.txt"),
        (["--prompt", "T", "--prompt-file", "rhyme.txt"], "not with both"),
        (["--prompt", "T", "--max-new-tokens", "many"], "many"),
    ],
)
def test_sampling_refuses_with_a_sentence(place, argv, words, monkeypatch, capsys):
    monkeypatch.chdir(place)
    code, error = run_main(sample, argv, monkeypatch, capsys)
    assert code == 2
    assert words in " ".join(error.replace("│", " ").split())
    assert "Traceback" not in error


def test_sampling_without_a_run_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, error = run_main(sample, ["--prompt", "T"], monkeypatch, capsys)
    assert code == 2
    assert "run `gptlite train` first" in error


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nonsense"], "quick"),
        (["--model.n-heads", "3"], "multiple of model.n_heads"),
        (["--training.steps", "0"], "training.steps must be at least 1"),
        (["--training.batch-size", "6", "--training.accumulation", "4"], "must divide"),
        (["--optimizer.schedule", "jagged"], "jagged"),
        (["--data.corpus", "absent.txt"], "no corpus absent.txt"),
        (["--data.corpus", "rhyme.txt", "--data.tokenizer", "words"], "no tokenizer 'words'"),
        (["--data.corpus", "short.txt"], "too short"),
        (["--data.corpus", "hf:ten.jsonl", "--model.context-length", "8"], "no letter that is to"),
        (["--data.corpus", ""], "name of the corpus is empty"),
        (["--data.corpus", "a" * 300], "no corpus aaa"),
        (["--data.corpus", "rhyme.txt", "--run", "a" * 300], "takes the name of a folder"),
        (["--model.d-model", "4000000000"], "d_model must be at least 1 and"),
        (["--model.mlp", "GELU"], "model.mlp must be one of gelu, silu,"),
        (["--data.corpus", "rhyme.txt", "--run", "one"], "--overwrite"),
        (["--data.corpus", "rhyme.txt", "--run", "a/b"], "'a/b'"),
        (["--data.corpus", "rhyme.txt", "--run", ""], "''"),
        (["--data.corpus", "rhyme.txt", "--run", ".."], "'..'"),
    ],
)
def test_training_refuses_with_a_sentence_and_leaves_nothing(
    place, argv, words, monkeypatch, capsys
):
    monkeypatch.chdir(place)
    (place / "short.txt").write_text("short")
    texts = [*["some text"] * 9, "a"]  # the last one is for validation, and nothing predicts it
    (place / "ten.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    before = sorted(str(path) for path in place.rglob("*"))
    code, error = run_main(train, argv, monkeypatch, capsys)
    assert code == 2
    assert words in " ".join(error.replace("│", " ").split())
    assert "Traceback" not in error
    assert sorted(str(path) for path in place.rglob("*")) == before


def test_an_estimate_prints_the_table_and_trains_nothing(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    command = ["s", "--data.corpus", "rhyme.txt"]
    estimate(parse_estimate([*command, "--training.accumulation", "3"]))
    assert f"with {12 // jax.device_count() // 3} rows at once" in capsys.readouterr().out
    estimate(parse_estimate(command))
    out = capsys.readouterr().out
    assert f"with {12 // jax.device_count()} rows at once" in out
    assert "stack.blocks.attention.heads.query (x 4)" in out
    assert "FLOPs per token, training" in out


def test_an_estimate_is_of_the_model_that_a_run_begins_from(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    run = next(path.parent for path in (place / "runs").glob("*/checkpoints"))
    estimate(parse_estimate(["--init-from", str(run), "--data.corpus", "rhyme.txt"]))
    model = load(run).model
    assert f"parameters                {count_parameters(model):,}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fit", "batch"], "--fit batch needs --for"),
        (["--for", "h100"], "--for must be a GPU and how many of them"),
        (["--resume", "x"], "unrecognized"),
        (["--model.separate-documents", "--data.corpus", "pydoc"], "an end-of-text token"),
        (["--model.n-layers", "2", "s"], "preset comes first: gptlite estimate s"),
    ],
)
def test_an_estimate_refuses_what_it_cannot_do(words, said, capsys):
    with pytest.raises((UserError, SystemExit)) as stop:
        estimate(parse_estimate(words))
    assert said.lower() in f"{stop.value} {capsys.readouterr().err}".lower()


def test_presets_and_what_follows_them():
    for name, (_, config) in PRESETS.items():
        assert parse_train([name]).config == config
    assert parse_train([]).config == PRESETS["quick"][1]
    changed = parse_train(["m", "--model.dropout", "0.5", "--training.seed", "7"]).config
    assert (changed.model.dropout, changed.training.seed) == (0.5, 7)
    assert changed.model.d_model == 384
    with pytest.raises(UserError, match="preset comes first"):
        parse_train(["--training.seed", "7", "s"])


@pytest.mark.processes
@pytest.mark.parametrize("script", ["train.py", "sample.py", "compare.py"])
def test_help_answers_without_waiting_for_jax(script):
    program = (
        f"import runpy, sys; sys.argv = ['{script}', '--help']\n"
        "try:\n"
        f"    runpy.run_path('{script}', run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "seed INT" in done.stdout


def test_documents_are_kept_apart(place):
    """From a dataset to a sample. What cannot have documents is refused before it is encoded."""
    lines = [json.dumps({"text": line}) + "\n" for line in TEXT.splitlines() if line]
    (place / "lines.jsonl").write_text("".join(lines))
    apart = ["--model.separate-documents", *TINY, "--training.steps", "2"]

    def words(corpus: str, tokenizer: str) -> list[str]:
        return ["--data.corpus", corpus, "--data.tokenizer", tokenizer, "--run", "apart", *apart]

    for corpus, tokenizer, sentence in (
        ("rhyme.txt", "bpe:256", "needs a dataset of documents, such as hf:FILE.jsonl, got the"),
        ("hf:lines.jsonl", "byte", "needs a tokenizer with an end-of-text token, such as bpe:4096"),
    ):
        done = run_script("train.py", *words(corpus, tokenizer), folder=place)
        assert done.code == 2
        assert sentence in done.err
    done = run_script("train.py", *words("hf:lines.jsonl", "bpe:260"), folder=place)
    assert done.code == 0, done.err
    run = load(place / "runs" / "apart")
    (end,) = run.tokenizer.end_ids
    first, second = run.tokenizer.encode("a line"), [end, *run.tokenizer.encode("another")]
    logits = eqx.filter_jit(run.model)
    together = logits(jnp.array([*first, *second]))[len(first) :]
    alone = logits(jnp.array(second))
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)
    done = run_script("sample.py", "--run", "apart", "--prompt", "a", folder=place)
    assert done.code == 0, done.err
