"""Bits per byte by tokenizer, after equal times of training, and how fast tokenizers encode:
`python benchmarks/vocabulary.py`.

Each tokenizer's steps are chosen by the speed of a short run before, so that all train for the same
time, without start and compilation. What follows `--` goes to train.py.
"""

import argparse
import os
import sys
import time

from common import print_table
from quality import train

PROBE = 80  # steps


def main() -> None:
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s [options] [-- OPTIONS OF train.py]"
    )
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--seconds", type=float, default=50.0, help="of training")
    parser.add_argument("--corpora", nargs="+", default=["auto", "pydoc"])
    parser.add_argument(
        "--tokenizers", nargs="+", default=["char", "bpe:256", "bpe:512", "bpe:1024", "bpe:4096"]
    )
    arguments = parser.parse_args(sys.argv[1:end])
    more = sys.argv[end + 1 :]
    for corpus in arguments.corpora:
        rows = []
        for tokenizer in arguments.tokenizers:
            words = ["--data.corpus", corpus, "--data.tokenizer", tokenizer, *more]
            rows.append([tokenizer, *learn(arguments.preset, words, arguments.seconds)])
            print(corpus, *rows[-1], flush=True)
        print(f"\n{corpus}, {arguments.preset}, {arguments.seconds:g} s of training")
        print_table(["tokenizer", "steps", "tokens", "seconds", "bits per byte"], rows)
    print("one core, the text of the first corpus, MB/s")
    print_table(["tokenizer", "gptlite", "the library tokenizers"], encode(arguments))


def learn(preset: str, words: list[str], seconds: float) -> list[str]:
    """Steps, tokens, seconds of training, and bits per byte at its end."""
    quiet = ["--training.sample-tokens", "0"]

    def run(steps: int) -> tuple[dict, list[dict]]:
        options = ["--training.steps", str(steps), "--training.eval-every", str(steps)]
        return train(preset, *words, *quiet, *options)[:2]

    _, metrics = run(PROBE)
    # Without the first lines: one step a dispatch, until its time is known.
    first, last = metrics[len(metrics) // 2], metrics[-1]
    pace = (last["step_seconds"] - first["step_seconds"]) / (last["step"] - first["step"])
    result, metrics = run(max(PROBE, round(seconds / pace)))
    return [
        f"{result['steps']:,}",
        f"{result['tokens']:,}",
        f"{metrics[-1]['step_seconds']:.0f}",
        f"{result['val_bits_per_byte']:.4f}",
    ]


def encode(arguments: argparse.Namespace) -> list[list[str]]:
    """Megabytes a second of each tokenizer, and of the same one in Hugging Face's library."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from gptlite.errors import UserError
    from gptlite.hugging_face.tokenizer import HFTokenizer, to_hf_tokenizer
    from gptlite.runs.corpora import load_corpus
    from gptlite.runs.tokenizers import make_tokenizer

    corpus = load_corpus(arguments.corpora[0])
    text = corpus.text
    size = len(text.encode()) / 1e6
    rows = []
    for name in [*arguments.tokenizers, "tiktoken:gpt2"]:
        try:
            tokenizer = make_tokenizer(name, corpus)
        except UserError as error:  # no network
            print(f"{name} is left out. {error}")
            continue
        speeds = []
        for contender in (tokenizer, HFTokenizer(to_hf_tokenizer(tokenizer))):
            start = time.perf_counter()
            contender.encode(text)
            speeds.append(f"{size / (time.perf_counter() - start):.1f}")
        rows.append([name, *speeds])
    return rows


if __name__ == "__main__":
    main()
