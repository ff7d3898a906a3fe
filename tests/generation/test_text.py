import itertools

import numpy as np
from hypothesis import given, strategies as st

from gptlite.generation.text import TextStream
from gptlite.text.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def shown(text: bytes, stop: list[str], cuts: list[int]) -> str:
    stream = TextStream(BYTES, stop)
    places = [0, *sorted(cuts), len(text)]
    pieces = [
        stream.feed(np.frombuffer(text[a:b], np.uint8).astype(np.int32))
        for a, b in itertools.pairwise(places)
    ]
    return "".join([*pieces, stream.finish()])


@given(
    text=st.text(alphabet="abé🙂\n", max_size=20),
    stop=st.lists(st.text(alphabet="abé🙂\n", min_size=1, max_size=3), max_size=3),
    data=st.data(),
)
def test_however_the_text_arrives_it_ends_before_the_first_stop(text, stop, data):
    content = text.encode()
    cuts = data.draw(st.lists(st.integers(0, len(content)), max_size=6))
    assert shown(content, stop, cuts) == before_first(stop, text)


def before_first(stop: list[str], text: str) -> str:
    """The reference: one character after the other."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - len(max(complete, key=len))]
    return text


def test_stop_strings_inside_each_other_end_the_text_where_the_first_is_complete():
    for cuts in ([], [1], [2], [1, 2, 3]):
        assert shown("abé".encode(), ["abé", "b"], cuts) == "a"
        assert shown(b"abc", ["c", "bc"], cuts) == "a"


def test_text_is_shown_as_soon_as_it_is_certain():
    stream = TextStream(BYTES, ["\n\n"])
    assert stream.feed(BYTES.encode("one\n")) == "one"
    assert stream.feed(BYTES.encode("two\n")) == "\ntwo"
    assert not stream.stopped
    assert stream.feed(BYTES.encode("\nthree")) == ""
    assert stream.stopped
    assert stream.feed(BYTES.encode("four")) == stream.finish() == ""


def test_half_a_character_at_the_end_is_marked():
    assert shown("é".encode()[:1], [], []) == "\ufffd"
    assert shown(b"ab" + "é".encode()[:1], ["b\ufffd"], []) == "a"
