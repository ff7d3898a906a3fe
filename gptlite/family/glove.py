"""Word vectors in GloVe's text format, for embedding tables to start from."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float

from gptlite.errors import UserError, require


def read_glove(
    path: Path | str, words: Sequence[str], *, seed: int = 0
) -> tuple[Float[np.ndarray, "words d"], Bool[np.ndarray, " words"]]:
    """A vector for each of `words`, and whether the file has one.

    The format is that of Pennington et al., 2014: a line per word, the word and its numbers, with a
    space between. Above them, word2vec and fastText write how many words there are, and numbers of
    each. The file is read line by line, and only vectors of `words` are kept. Words that it lacks
    get vectors drawn with `seed` from a normal distribution with the mean and the standard
    deviation of those found, channel by channel.

    **Raises:** `UserError` if the file cannot be read, a line has another format, or the file has
    none of the words.
    """
    vectors: dict[str, np.ndarray] = {}
    wanted, d = set(words), 0
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if number == 1 and _is_head(line):
                    d = int(line.split()[1])
                    continue
                d = d or len(line.rstrip().split(" ")) - 1
                # From the right: in the largest of GloVe's files, some words have spaces in them.
                word, *numbers = line.rstrip().rsplit(" ", d)
                # In a line with too many numbers, the word ends with one.
                require(
                    len(numbers) == d
                    and d >= 1
                    and (not _is_number(word.rpartition(" ")[2]) or " " not in word),
                    f"Line {number} of {path} must be a word and {max(d, 1)} numbers, with a "
                    f"space between, got {line[:60].rstrip()!r}.",
                )
                if word in wanted:
                    vectors[word] = _vector(numbers, f"Line {number} of {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The vectors in {path} cannot be read: {error}.") from error
    if not vectors:
        example = f", as {words[0]!r}" if words else ""
        raise UserError(f"{path} has none of the {len(words):,} words{example}.")
    known = np.array([word in vectors for word in words])
    stacked = np.stack(list(vectors.values()))
    drawn = np.random.default_rng(seed).normal(
        stacked.mean(axis=0), stacked.std(axis=0), size=(len(words), d)
    )
    drawn[known] = [vectors[word] for word in words if word in vectors]
    return drawn.astype(np.float32), known


def _is_head(line: str) -> bool:
    fields = line.split()
    return len(fields) == 2 and all(x.isascii() and x.isdecimal() and len(x) < 10 for x in fields)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _vector(numbers: Sequence[str], where: str) -> np.ndarray:
    """**Raises:** `UserError` if one is not a finite number."""
    try:
        with np.errstate(over="ignore"):
            vector = np.array(numbers, np.float32)
    except ValueError as error:
        raise UserError(f"{where} has something that is not a number: {error}.") from error
    # In Python's numbers, `_` may be between the digits.
    require(not any("_" in x for x in numbers), f"{where} has something that is not a number: _.")
    require(bool(np.isfinite(vector).all()), f"{where} has a number that is not finite.")
    return vector
