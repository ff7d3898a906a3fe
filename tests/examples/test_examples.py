"""What the examples promise. (`tests/soak/docs.py`, which `.ci/run` starts, runs them all.)"""

import re
import runpy
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import ROOT, TEXT, VOCAB, run_script, tiny_model

from gptlite.custom import load_class
from gptlite.generation.generate import generate
from gptlite.research.check_block import check_block

RECURRENT = f"{ROOT / 'examples' / 'min_gru.py'}:MinGRU"


def test_a_recurrent_state_passes_checks_and_serves_prompts_of_different_lengths():
    block = load_class(RECURRENT)
    checks = ["causal", "cached", "padding", "gradients", "scan"]
    assert list(check_block(block, checks=checks).checks) == checks
    model = tiny_model(attention=block)
    prompts = jax.random.randint(jax.random.key(0), (3, 9), 0, VOCAB)
    lengths, keys = np.array([9, 1, 5]), jax.random.split(jax.random.key(1), 3)
    together = generate(model, prompts, 20, lengths=lengths, keys=keys)
    for row, length in enumerate(lengths):
        prompt, key = prompts[row : row + 1, :length], keys[row : row + 1]
        np.testing.assert_array_equal(generate(model, prompt, 20, keys=key)[0], together[row])


def test_a_recurrent_state_trains_samples_and_resumes(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    custom = ["--custom", RECURRENT.partition(":")[0]]
    shape = ["--model.n-layers", "1", "--model.d-model", "16", "--model.context-length", "16"]
    shape += ["--optimizer.name", "adamw"]
    data = ["--run", "recurrent", "--data.corpus", str(tmp_path / "text.txt"), *shape]

    def script(name, *words):
        done = run_script(name, *words, *custom, folder=tmp_path)
        assert done.code == 0, done.err
        return done.out

    script("train.py", *data, "--training.steps", "4", "--model.attention", RECURRENT)
    again = ["--resume", "recurrent", "--data.corpus", str(tmp_path / "text.txt")]
    script("train.py", *again, "--training.steps", "8")
    assert len(script("sample.py", "--prompt", "The", "--max-new-tokens", "40")) == 41


def test_the_answers_to_reverse_are_the_ones_that_it_describes():
    reverse = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "reverse.py")))
    shown, wanted = "0 1 5 9 0 3 5 2 5 7", "7 5 2 X 3 X 9 5 1 0"
    found = reverse.answer(np.array([[int(digit) for digit in shown.split()]]))[0]
    assert " ".join("X" if i == reverse.X else str(i) for i in found) == wanted
    assert f"`{shown}` gives `{wanted}`" in (ROOT / "examples" / "reverse.py").read_text()


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("rot13.py --seed -1", "", "error: training.seed must be at least .* got -1."),
        ("reverse.py --steps 0", None, "error: training.steps must be at least .* got 0."),
        ("rot13.py", "too few words", "error: .* has 3 words; more are needed."),
        ("glove.py", "too few words", "error: .* has 3 words; more are needed."),
        ("masked.py", TEXT, "error: .* must have 10 speakers with at least 5 speeches each."),
    ],
)
def test_a_text_that_will_not_do_is_said(tmp_path, name, text, sentence):
    name, *words = name.split()
    if text is not None:
        (tmp_path / "text.txt").write_text(text)
        words += ["--corpus", "text.txt"]
    done = run_script(f"examples/{name}", *words, folder=tmp_path)
    assert done.code == 2
    assert re.fullmatch(sentence + "\n", done.err), done.err
