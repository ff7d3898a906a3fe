"""The names of blocks and of their options, in the config, its help and the blocks themselves."""

import ast
import dataclasses
import inspect
import re
from typing import Any

import equinox as eqx
import jax
import pytest
from conftest import TINY

from gptlite import config as config_module
from gptlite.config import ModelConfig
from gptlite.errors import UserError
from gptlite.machine.names import BlockNames, split_options, with_options
from gptlite.models.build import TABLES, find_part, make_part
from gptlite.nn.variants.rotary_options import RotaryOptions


def helps() -> dict[str, str]:
    """The docstrings of the fields of `ModelConfig`."""
    tree = ast.parse(inspect.getsource(config_module))
    (cls,) = (x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "ModelConfig")
    found = {}
    for field, text in zip(cls.body, cls.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found


def options_of(field: str, name: str) -> type | None:
    """The dataclass of a block's options."""
    parameter = inspect.signature(TABLES[field][name]).parameters.get("options")
    return None if parameter is None else parameter.annotation


@pytest.mark.parametrize("field", TABLES)
def test_the_config_has_the_names_of_all_blocks(field):
    assert set(BlockNames.of(ModelConfig, field)) == TABLES[field].keys()


@pytest.mark.parametrize("field", TABLES)
def test_the_help_names_all_options_and_their_defaults(field):
    text = helps()[field]
    for name in TABLES[field]:
        kind = options_of(field, name)
        for option in dataclasses.fields(kind) if kind else ():
            assert option.name in text, f"{option.name} of {name}"
            said = re.findall(rf"\b{option.name}=([\w.+-]*\w)", text)
            if isinstance(option.default, bool):
                assert said == ["true"], "how it is switched on"
            elif field == "norm":  # eps, of two norms
                assert option.default in [float(x) for x in said]
            elif said:
                assert [float(x) for x in said] == [option.default]
            else:
                assert str(option.default) in text


@pytest.mark.parametrize(
    ("field", "text", "changes"),
    [
        ("attention", "sliding:qk_gain=true:window=7", {"window": 7, "qk_gain": True}),
        ("positions", "rotary:theta=500000.0:factor=8.0", {"theta": 500_000.0, "factor": 8.0}),
        ("norm", "layer:eps=0.001", {"eps": 1e-3}),
        ("mlp", "moe:n_experts=8", {"n_experts": 8}),
        ("positions", "relative", {}),
    ],
)
def test_options_are_written_as_they_are_read(field, text, changes):
    config = dataclasses.replace(TINY, **{field: text})
    options = find_part(field, config)[1]["options"]
    assert options == dataclasses.replace(type(options)(), **changes)
    assert with_options(split_options(text)[0], options) == text


def test_theta_of_attention_is_for_rotary_positions_alone():
    config = dataclasses.replace(TINY, attention="sliding:theta=50", positions="rotary:share=0.5")
    positions = make_part("attention", config, jax.random.key(0)).positions
    assert positions.options == RotaryOptions(theta=50.0, share=0.5)
    config = dataclasses.replace(config, positions="alibi")
    with pytest.raises(UserError, match=r"theta of model\.attention needs --model.positions rot"):
        make_part("attention", config, jax.random.key(0))


class Itself(eqx.Module):
    """Made of the part that the config names, which is this one."""

    inner: Any

    def __init__(self, config, *, key):
        self.inner = make_part("mlp", config, key)


def test_a_part_that_makes_itself_is_told():
    with pytest.raises(UserError, match=r"model\.mlp .*Itself makes itself, without an end"):
        make_part("mlp", dataclasses.replace(TINY, mlp=Itself), jax.random.key(0))


def test_a_layer_with_a_state_has_the_options_of_its_name():
    config = dataclasses.replace(TINY, attention="kda:conv=2")
    assert len(make_part("attention", config, jax.random.key(0)).conv.weights) == 2
    for text, words in {
        "kda:conv=0": r"conv in model\.attention kda must be at least 1",
        "kda:window=3": r"model\.attention kda has no option window: its options are conv",
        "gla:conv=2": r"model\.attention gla has no option conv: it has no options",
    }.items():
        with pytest.raises(UserError, match=words):
            make_part("attention", dataclasses.replace(TINY, attention=text), jax.random.key(0))


def test_a_block_has_the_options_of_its_name():
    config = dataclasses.replace(TINY, attention="sliding:window=3:qkv_bias=true")
    attention = make_part("attention", config, jax.random.key(0))
    assert attention.window == 3
    assert attention.heads.query.bias is not None
    assert attention.heads.output.bias is None
