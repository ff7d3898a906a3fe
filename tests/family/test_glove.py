import numpy as np
import pytest
from hypothesis import given, strategies as st

from gptlite.errors import UserError
from gptlite.family.glove import read_glove

number = st.floats(-10, 10, width=32)
word = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=8)


@given(st.dictionaries(word, st.tuples(number, number, number), min_size=1, max_size=10))
def test_what_was_written_is_read(tmp_path_factory, table):
    path = tmp_path_factory.mktemp("glove") / "vectors.txt"
    lines = (" ".join([word, *map(repr, row)]) for word, row in table.items())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    vectors, known = read_glove(path, list(table))
    assert known.all()
    np.testing.assert_array_equal(vectors, np.array(list(table.values()), np.float32))


def test_words_that_it_lacks_are_drawn_like_the_others(tmp_path):
    path = tmp_path / "vectors.txt"
    random = np.random.default_rng(0)
    there = random.normal([5.0, -1.0], [0.1, 2.0], size=(500, 2))
    path.write_text("".join(f"w{i} {a} {b}\n" for i, (a, b) in enumerate(there)))
    words = [*(f"w{i}" for i in range(500)), *(f"new{i}" for i in range(500))]
    vectors, known = read_glove(path, words)
    assert known.tolist() == [True] * 500 + [False] * 500
    np.testing.assert_allclose(vectors[500:].mean(0), there.mean(0), atol=0.3)
    np.testing.assert_allclose(vectors[500:].std(0), there.std(0), rtol=0.2)
    again, _ = read_glove(path, words)
    np.testing.assert_array_equal(again, vectors)


@pytest.mark.parametrize("begin", ["", "\ufeff", "2 2\n", "\ufeff2 2\n"])
def test_forms_of_other_programs_are_read(tmp_path, begin):
    """A byte order mark, and the head of word2vec's and fastText's files."""
    path = tmp_path / "vectors.txt"
    path.write_text(f"{begin}the 1 2\n2 3 4\n", encoding="utf-8")
    vectors, known = read_glove(path, ["the", "2"])
    assert (vectors.tolist(), known.tolist()) == ([[1.0, 2.0], [3.0, 4.0]], [True, True])


def test_a_word_may_have_spaces(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("the 1 2\n. . . 3 4\n")
    assert read_glove(path, [". . ."])[0].tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"the 1 2\na 3\n", "Line 2 of .* must be a word and 2 numbers, .*got 'a 3'"),
        (b"the\n", "Line 1 of .* must be a word and 1 numbers, with a space between, got 'the'"),
        (b"\n", "Line 1 of .* must be a word and 1 numbers"),
        (b"the 1 2\na 3 4 5\n", "Line 2 of .* must be a word and 2 numbers, .*got 'a 3 4 5'"),
        (b"2 3\nthe 1 2\n", "Line 2 of .* must be a word and 3 numbers"),
        (b"2 3\n", "has none of the 1 words"),
        (b"the 1_0\n", "Line 1 of .* not a number"),
        (b"the 1e39\n", "Line 1 of .* not finite"),
        (b"the 1 x\n", "Line 1 of .* not a number"),
        (b"the 1 nan\n", "Line 1 of .* not finite"),
        (b"a 1 2\n", "has none of the 1 words, as 'the'"),
        (b"", "has none of the 1 words"),
        (b"\xff\xfe", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_malformed_file_of_vectors_is_refused(tmp_path, content, sentence):
    path = tmp_path / "vectors.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_glove(path, ["the"])
