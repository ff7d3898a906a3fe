"""Reads a dataset whose texts are known: `dataset_once NAME FILE`. FILE is JSON: a list of the
texts, or null if one of them is none, so that the dataset is to be refused."""

import itertools
import json
import sys
from pathlib import Path

from gptlite.cli import exit_on_error
from gptlite.hugging_face.datasets import open_dataset


def main() -> None:
    name, file = sys.argv[1:]
    expected = json.loads(Path(file).read_bytes())
    with exit_on_error():
        texts = list(open_dataset(name).read(None))
        assert expected is not None, "a dataset with something else than texts was read"
        for i, (text, right) in enumerate(itertools.zip_longest(texts, expected)):
            assert text == right, f"text {i} of {len(expected)} is {text!r:.99}, not {right!r:.99}"
        print(f"{len(texts)} texts")


if __name__ == "__main__":
    main()
