import pytest

from gptlite.errors import UserError, told


class Panic(BaseException):
    """As those of libraries in Rust."""


@pytest.mark.parametrize(
    "error", [ValueError("a\nb"), Panic("a"), KeyError("a"), RecursionError("a.")]
)
def test_whatever_a_library_raises_is_told_in_a_sentence(error):
    with (
        pytest.raises(UserError, match=r"^The file cannot be read: '?a'?\.$"),
        told("The file cannot be read"),
    ):
        raise error


def test_a_library_that_finds_nothing_says_so():
    with pytest.raises(UserError, match=r": it is empty\.$"), told("The file cannot be read"):
        next(iter(()))


@pytest.mark.parametrize("kind", [UserError, KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_no_error_of_the_library_goes_on(kind):
    with pytest.raises(kind, match=r"^a$"), told("x"):
        raise kind("a")
