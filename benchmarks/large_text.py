"""A text of a gigabyte: how fast it becomes ids, in how much memory, and what training from it
costs against training on a small one.

    python benchmarks/large_text.py

Encoding is measured on one core, as `gptlite train` does it: a text is read and checked, then
encoded into a file; the documents of a dataset, here JSON lines, are streamed into one, and beside
it stands how fast the tokenizer alone encodes them. `quick` trains in alternation on the text and
on TinyShakespeare (without a network, on pydoc).
"""

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Contender, Round, interleave, memory_now, print_machine, print_table, spread

STEPS = 40
DOCUMENT = 2000  # characters


def encode(path: Path, kind: str, folder: Path) -> dict[str, float]:
    """Megabytes a second, and memory, from the file to its ids."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from gptlite.runs.corpora import load_corpus
    from gptlite.runs.tokenizers import make_tokenizer
    from gptlite.text.tokens import split_corpus

    name = f"hf:{path}" if path.suffix == ".jsonl" else str(path)
    before, peak, done = memory_now("RssAnon"), [0.0], threading.Event()
    peak_of_children = [0.0]

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], memory_now("RssAnon"))
            peak_of_children[0] = max(peak_of_children[0], memory_of_children())

    threading.Thread(target=watch, daemon=True).start()
    start = time.perf_counter()
    corpus = load_corpus(name)
    tokenizer = make_tokenizer(kind, corpus)
    read = time.perf_counter()
    split_corpus(corpus, tokenizer, folder=folder)
    end = time.perf_counter()
    done.set()
    megabytes = path.stat().st_size / 1e6
    return {
        "read": megabytes / (read - start),
        "encode": megabytes / (end - read),
        "both": megabytes / (end - start),
        "memory": peak[0] - before,
        "reader's memory": peak_of_children[0],
    }


def memory_of_children() -> float:
    """Of the processes that this one started, in MiB: the one that reads a dataset."""
    total = 0.0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError, ValueError):  # it, or a process that it began, has ended
            for child in (thread / "children").read_text().split():
                total += memory_now("RssAnon", child)
    return total


def encode_alone(path: Path, kind: str) -> float:
    """Megabytes a second of the tokenizer, on documents that are in memory."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from gptlite.runs.corpora import load_corpus
    from gptlite.runs.tokenizers import make_tokenizer

    with path.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(5000), strict=False)]
    tokenizer = make_tokenizer(kind, load_corpus(f"hf:{path}"))
    tokenizer.encode(texts[0])
    start = time.perf_counter()
    for text in texts:
        tokenizer.encode(text)
    return sum(len(text.encode()) for text in texts) / 1e6 / (time.perf_counter() - start)


def train(name: str, folder: Path) -> Round:
    """Rounds of `STEPS` steps of `quick` on the corpus `name`."""
    from gptlite.machine.runtime import set_up_jax

    set_up_jax(2)
    import jax

    from gptlite.config import OptimizerConfig, TrainingConfig
    from gptlite.machine.mesh import make_mesh
    from gptlite.models.gpt import GPT
    from gptlite.presets import PRESETS
    from gptlite.runs.corpora import load_corpus
    from gptlite.runs.tokenizers import make_tokenizer
    from gptlite.text.batches import Batches
    from gptlite.text.tokens import split_corpus
    from gptlite.training.fit import fit
    from gptlite.training.step import TrainSteps

    corpus = load_corpus(name)
    tokenizer = make_tokenizer("char", corpus)
    split = split_corpus(corpus, tokenizer, folder=folder)
    config = PRESETS["quick"][1].model
    training = TrainingConfig(steps=10**6, eval_every=10**6, log_every=20)
    model = GPT(config, tokenizer.vocab_size, key=jax.random.key(0))
    train_steps = TrainSteps(model, OptimizerConfig(), training, make_mesh())
    batches = Batches(split.train, training.batch_size, config.context_length, training.seed)
    fitting = fit(train_steps.init(model), train_steps, batches)

    def work() -> float:
        before = next(fitting).position
        after = before
        while after.step < before.step + STEPS:
            after = next(fitting).position
        seconds = after.step_seconds - before.step_seconds
        return STEPS * seconds / (after.step - before.step)

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokenizers", nargs="+", default=["tiktoken:gpt2", "bpe:4096"])
    arguments = parser.parse_args()
    from gptlite.errors import UserError
    from gptlite.presets import PRESETS
    from gptlite.runs.corpora import load_corpus

    print_machine()
    small = load_corpus("auto")
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "large.txt"
        with path.open("w", encoding="utf-8") as file:
            number = 0
            while file.tell() < arguments.megabytes * 1_000_000:
                file.write(f"{small.text}\n{number} é🙂\n")
                number += 1
        documents = path.with_suffix(".jsonl")
        with path.open(encoding="utf-8") as file, documents.open("w", encoding="utf-8") as lines:
            while text := file.read(DOCUMENT):
                lines.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")

        def alone(function: Callable[..., Any], *words: Any) -> Any:
            """`function(*words)` in a process of its own."""
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
                return process.submit(function, *words).result()

        rows: list[list[Any]] = []
        for kind in ("char", "byte"):
            found = alone(encode, path, kind, Path(place))
            rows.append([kind, *(f"{found[x]:,.0f}" for x in ("read", "encode", "both", "memory"))])
        print_table(["ids", "read, MB/s", "encode, MB/s", "both, MB/s", "extra memory, MiB"], rows)
        rows = []
        for kind in arguments.tokenizers:
            try:
                found = alone(encode, documents, kind, Path(place))
            except UserError as error:  # no network
                print(f"{kind}: {error}")
                continue
            speed = alone(encode_alone, documents, kind)
            memory = (f"{found[x]:,.0f}" for x in ("memory", "reader's memory"))
            rows.append([kind, f"{found['both']:.1f}", f"{speed:.1f}", *memory])
        reader = "of the process that reads, in all"
        print_table(
            ["streamed", "MB/s", "tokenizer alone, MB/s", "extra memory, MiB", reader], rows
        )
        contenders = [Contender(name, train, name, Path(place)) for name in (small.name, str(path))]
        seconds = interleave(contenders, arguments.rounds)
        quick = PRESETS["quick"][1]
        tokens = STEPS * quick.training.batch_size * quick.model.context_length
        print_table(
            ["trained on", "tokens/s", "own memory, MiB", "peak, mapped file included"],
            [
                [
                    "the large text" if contender.name == str(path) else contender.name,
                    spread([tokens / s for s in seconds[contender.name]]),
                    f"{contender.memory():,.0f}",
                    f"{contender.close():,.0f}",
                ]
                for contender in contenders
            ],
        )


if __name__ == "__main__":
    main()
