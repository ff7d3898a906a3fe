"""A short run of tests/soak/fuzz.py."""

import pytest
from support.fuzzing import fuzz


@pytest.mark.processes
def test_hostile_input_ends_with_a_result_or_a_message(tmp_path):
    folder = tmp_path / "fuzz"
    assert fuzz(folder, seed=0, more=lambda done, _: done < 25, comparisons=False) == []
