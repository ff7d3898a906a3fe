"""The first losses of a few runs are those that they have been."""

import json

import pytest
from support.golden import FILE, TOLERANCE, TOLERANCES, commands, difference, losses, make_texts

GOLDEN = json.loads(FILE.read_text())


def test_every_run_has_golden_losses():
    assert commands().keys() == GOLDEN.keys()


@pytest.mark.parametrize("name", GOLDEN)
def test_the_first_losses_are_what_they_were(name, tmp_path):
    """If a change of them is meant: `python tests/support/golden.py --write`."""
    make_texts(tmp_path)
    found = difference(losses(name, tmp_path), GOLDEN[name])
    wanted = TOLERANCES.get(name, TOLERANCE)
    assert found.first <= wanted.first, found
    assert found.all <= wanted.all, found
