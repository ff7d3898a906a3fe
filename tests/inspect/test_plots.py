import numpy as np
import pytest

from gptlite.inspect import plots
from gptlite.runs.plots import save_picture


def test_heads_stand_side_by_side_with_tokens_on_the_axes(tmp_path):
    weights = np.random.default_rng(0).dirichlet(np.ones(4), size=(3, 2))
    figure = plots.attention(weights, ["a", " "], ["x", "\n", "$y$", "^_"], title="layer 0")
    assert len(figure.axes) == 3
    for head, axes in enumerate(figure.axes):
        np.testing.assert_array_equal(axes.images[0].get_array(), weights[head])
        assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "␣"]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["x", "⏎", "$y$", "^_"]
        assert axes.get_title() == f"head {head}"
    (tmp_path / "other").write_text("kept")
    (tmp_path / "attention.png").symlink_to("other")
    save_picture(figure, tmp_path / "attention.png")
    assert (tmp_path / "attention.png").stat().st_size > 1000
    assert (tmp_path / "other").read_text() == "kept"


def test_queries_are_the_keys_where_there_are_no_others():
    axes = plots.attention(np.eye(2)[None], "ab").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]


def test_tokens_and_weights_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"must be 2 queries and 3 keys, .* got 3 and 3"):
        plots.attention(np.zeros((1, 2, 3)), "abc")
