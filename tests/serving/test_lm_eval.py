"""lm-evaluation-harness, with its client for this API, on a small task of multiple choice."""

import importlib
import json
import random
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, needs
from support.servers import NAME, TOKENIZER, served_model, serving

from gptlite.hugging_face.tokenizer import to_hf_tokenizer

CHOICES = ["ab", "cde", "f"]


@needs("lm_eval", "transformers")
def test_the_harness_measures_what_the_model_says(tmp_path, monkeypatch):
    """Its accuracy, and each of its log probabilities, against those of the model called
    directly."""
    lm_eval: Any = importlib.import_module("lm_eval")

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    choose = random.Random(0)
    questions = [
        {
            "question": "".join(choose.choices(TOKENIZER.characters, k=choose.randint(1, 6))),
            "gold": i % 3,
        }
        for i in range(24)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)))
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(to_hf_tokenizer(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    task = {
        "task": "letters",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "gold",
        "doc_to_choice": CHOICES,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    with serving() as address:
        result = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "base_url": f"{address.url}/completions",
                "model": NAME,
                "tokenizer": str(folder),
                "tokenizer_backend": "huggingface",
                "num_concurrent": 4,
                "max_length": TINY.context_length,
                "batch_size": 2,
            },
            tasks=[task],
            bootstrap_iters=0,
        )
    model, right = eqx.filter_jit(served_model()), 0
    for sample in result["samples"]["letters"]:
        question, gold = sample["doc"]["question"], sample["doc"]["gold"]
        direct = []
        for choice, (found,) in zip(CHOICES, sample["resps"], strict=True):
            ids = TOKENIZER.encode(question + choice)
            log_probs = np.asarray(jax.nn.log_softmax(model(jnp.asarray(ids)), axis=-1))
            places = range(len(question), len(ids))
            direct.append(sum(log_probs[place - 1, ids[place]] for place in places))
            # A sum of at most three of float32's log probabilities near 3.
            np.testing.assert_allclose(float(found[0]), direct[-1], atol=3e-4)
            greedy = all(log_probs[place - 1].argmax() == ids[place] for place in places)
            assert bool(found[1]) == greedy
        right += int(np.argmax(direct)) == gold
    assert len(result["samples"]["letters"]) == len(questions)
    assert result["results"]["letters"]["acc,none"] == pytest.approx(right / len(questions))
