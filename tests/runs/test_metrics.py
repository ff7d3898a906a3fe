"""Lines of metrics, read as curves."""

import json
import os

import numpy as np
import pytest

from gptlite.runs.metrics import last_step
from gptlite.serving.curves import read_curves, thinned


def test_curves_are_read_on_from_where_they_ended(tmp_path):
    lines = [{"step": step, "train_loss": 3 - step / 10} for step in range(1, 9)]
    for line in lines[3::4]:
        line["val_loss"] = line["train_loss"] + 0.5
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content[:-20])  # the last line is being written
    first = read_curves(tmp_path, "", 0, 100)
    assert first.complete
    path.write_bytes(content)  # the same file goes on
    second = read_curves(tmp_path, first.file, first.end, 100)
    for name, key in (("train", "train_loss"), ("validation", "val_loss")):
        parts = getattr(first, name), getattr(second, name)
        steps, losses = (np.concatenate(both) for both in zip(*parts, strict=True))
        expected = [(line["step"], line[key]) for line in lines if key in line]
        assert list(zip(steps, losses, strict=True)) == expected
    assert len(second.train[0]) == 1
    # A run that is resumed begins another file.
    new = tmp_path / "new"
    new.write_bytes(content)
    os.replace(new, path)
    assert len(read_curves(tmp_path, second.file, second.end, 100).train[0]) == len(lines)


def test_lines_that_are_no_metrics_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'null\n{"step": 1, "train_loss": 2.5, "rate": [{"step": 7}]}\n\n[]\n\xff\n'
        b'{"step": 2, "train_loss": 1, "\xff": 1}\n{"step": 2, "train_loss": 1, "val_loss": null}\n'
        b'{"step": "2", "train_loss": 1}\n{"step": 2.5, "train_loss": 1}\n{"train_loss": 1}\n'
        b'{"step": 3, "train_loss": NaN}\n{"step": 3, "val_loss": 1}\n'
        b'{"step": -3, "train_loss": 1}\n{"step": 99999999999999999999, "train_loss": 1}\n'
        b'{"step": 2147483648, "train_loss": 1}\n{"step": 4, "train_loss": 1e300}\n'
        b'{"step": 4, "train_loss": -1e300}\n'
        b'{"step": 4, "train_loss": 1} {"step": 4, "train_loss": 1}\n'
        b'{"step": 4, "train_loss": 1, "x": ' + b"[" * 9000 + b"\n"
        b'{"step": 5, "train_loss": 1.5, "val_loss": 2}\n'
        b'{"step": 6, "train_loss": null, "val_loss": 3}\n{"step": 7, "train_loss": 1}'
    )
    found = read_curves(tmp_path, "", 0, 100)
    assert [x.tolist() for x in found.train] == [[1, 5], [2.5, 1.5]]
    assert [x.tolist() for x in found.validation] == [[5, 6], [2.0, 3.0]]
    assert last_step(tmp_path) == 6  # the line of step 7 may still be written


def test_a_file_without_lines_has_an_end(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"a" * (2**22 + 10))
    first = read_curves(tmp_path, "", 0, 100)
    assert not first.complete
    second = read_curves(tmp_path, first.file, first.end, 100)
    assert second.complete
    assert second.end == first.end


def test_thinning_keeps_the_extremes_in_order():
    generator = np.random.default_rng(0)
    steps, values = np.arange(10_000), generator.normal(size=10_000)
    fewer, kept = thinned(steps, values, 1000)
    assert len(fewer) <= 1000
    assert np.all(np.diff(fewer) > 0)
    np.testing.assert_array_equal(values[fewer], kept)
    assert values.max() in kept
    assert values.min() in kept
    for begin in range(0, 10_000, 2500):  # everywhere: half of the points, a quarter each
        assert np.sum((fewer >= begin) & (fewer < begin + 2500)) > 120


def test_thinning_keeps_the_beginning_for_a_logarithmic_axis():
    steps = np.arange(1, 100_001)
    fewer, _ = thinned(steps, 1 / steps, 1000)
    for begin in 10.0 ** np.arange(5):
        assert np.sum((fewer >= begin) & (fewer < 10 * begin)) >= 9


def test_curves_of_a_link_are_not_read(tmp_path):
    (tmp_path / "elsewhere").write_text('{"step": 1, "train_loss": 2.5}\n')
    (tmp_path / "metrics.jsonl").symlink_to("elsewhere")
    with pytest.raises(OSError, match="link"):
        read_curves(tmp_path, "", 0, 100)
