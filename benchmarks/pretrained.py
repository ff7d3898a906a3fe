"""A pretrained model, imported and exported again, against `transformers`:
`python benchmarks/pretrained.py FOLDER`, with a folder in Hugging Face's format."""

import argparse
import sys
import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from common import print_table
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from gptlite import SamplingConfig, generate
from gptlite.hugging_face.folder import export_run, load_hf

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n",
    "ROMEO:\nBut soft, what light through yonder window breaks? It is the east, and Juliet is",
)
NEW_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="FOLDER")
    folder = parser.parse_args().folder
    run = load_hf(folder)
    # Its two implementations of attention show how much rounding changes.
    peer, eager = (
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        ).eval()
        for attention in ("sdpa", "eager")
    )
    peer_tokenizer = AutoTokenizer.from_pretrained(folder)
    logits = eqx.filter_jit(lambda model, ids: model(ids))

    rows = []
    for prompt in PROMPTS:
        ids = [*run.tokenizer.start_ids, *run.tokenizer.encode(prompt).tolist()]
        peer_ids = peer_tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            wanted, again = (
                model(torch.tensor([peer_ids])).logits[0].numpy() for model in (peer, eager)
            )
            peer_text = peer.generate(  # pyright: ignore[reportAttributeAccessIssue] - its own protocol
                torch.tensor([peer_ids]),
                attention_mask=torch.ones(1, len(peer_ids), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
            )[0, len(peer_ids) :].numpy()
        found = np.asarray(logits(run.model, jnp.asarray([ids]))[0], np.float32)
        keys = jax.random.split(jax.random.key(0), 1)
        config = SamplingConfig(greedy=True)
        text = np.asarray(generate(run.model, jnp.asarray([ids]), NEW_TOKENS, config, keys=keys)[0])
        agree = text[: len(peer_text)] == peer_text  # the peer ends with the text
        same = int(np.argmin([*agree, False]))
        rows.append(
            [
                repr(prompt[:24]),
                str(ids == peer_ids),
                f"{np.abs(found - wanted).max():.1e}",
                f"{np.abs(again - wanted).max():.1e}",
                f"{np.abs(wanted).max():.1f}",
                f"{same} of {len(peer_text)}",
                repr(run.tokenizer.decode(text)[:20]),
            ]
        )
    print_table(
        ["prompt", "same ids", "largest difference of logits",
         "of the peer's two attentions", "largest logit",
         "greedy ids that agree", "its greedy text begins"],
        rows,
    )  # fmt: skip

    with tempfile.TemporaryDirectory() as name:
        export_run(run, Path(name) / "again")
        files = [path / "model.safetensors" for path in (Path(folder), Path(name) / "again")]
        before, after = (safe_open(path, "numpy") for path in files)
        same = set(before.keys()) == set(after.keys()) and all(
            np.array_equal(before.get_tensor(tensor), after.get_tensor(tensor))
            for tensor in before.keys()  # noqa: SIM118 - it is no dict
        )
    if not same:
        sys.exit("\nexported again, the weights differ")
    print("\nexported again, all weights are the same")


if __name__ == "__main__":
    main()
