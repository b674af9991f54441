"""The options of a scaler: declared once, and visible in the signature and the docstring of each constructor."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from axes import require

import gradscale
from gradscale import DynamicScale, GradScaler, InvalidTypeError, InvalidValueError, ShardedGradScaler
from gradscale.scaler.options import CommonOptions, ScalerOptions, chosen_policy, completed, with_options


def constructors() -> list[Any]:
    return [GradScaler, ShardedGradScaler]


def torchs() -> list[Any]:
    require("torch")
    import gradscale_torch

    return [gradscale_torch.GradScaler, gradscale_torch.ShardedGradScaler]


def assert_shown(constructor: Any, options: Any) -> None:
    shown = inspect.signature(constructor).parameters
    assert not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in shown.values())
    for name, kind in options.__annotations__.items():
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert shown[name].annotation == kind
        assert shown[name].default == completed({})[name]  # type: ignore[literal-required]
        assert name in constructor.__doc__
    assert "**options" not in constructor.__doc__
    # The entries stand in the section of the parameters, as deep as the others.
    section = inspect.cleandoc(constructor.__doc__).partition("\nParameters\n----------\n")[2].partition("\n\n")[0]
    assert all(re.match(r"\w|    \S", line) for line in section.splitlines())
    assert "\nhistory_size : int, default 1024\n    How many" in section


@pytest.mark.parametrize("index", [0, 1], ids=["alone", "sharded"])
def test_every_constructor_shows_every_option(index: int) -> None:
    assert_shown(constructors()[index], ScalerOptions)


@pytest.mark.torch
@pytest.mark.parametrize("index", [0, 1], ids=["alone", "sharded"])
def test_torchs_replacements_show_those_that_they_share(index: int) -> None:
    assert_shown(torchs()[index], CommonOptions)


class Hiding:
    """Hide.

    Parameters
    ----------
    **options

    Notes
    -----
    None.
    """

    def __init__(self, **options: Any) -> None:
        """Take anything."""


def test_a_constructor_that_hides_an_option_is_found() -> None:
    with pytest.raises(AssertionError):
        assert_shown(Hiding, CommonOptions)
    assert_shown(with_options(CommonOptions)(Hiding), CommonOptions)


def test_a_name_that_is_no_option_is_an_error() -> None:
    for make in (GradScaler, lambda **options: ShardedGradScaler(group=None, **options)):
        with pytest.raises(InvalidTypeError, match=r"unexpected keyword arguments \['growth'\]") as caught:
            make(growth=2.0)
        assert isinstance(caught.value, TypeError)
    with pytest.raises(TypeError):
        GradScaler(65536.0)  # type: ignore[misc]


def test_a_policy_is_chosen_by_the_factors_or_given() -> None:
    assert chosen_policy(None, {"init_scale": 8.0, "growth_factor": None}) == DynamicScale(init_scale=8.0)
    policy = gradscale.StaticScale(8.0)
    assert chosen_policy(policy, {"init_scale": None}) is policy
    with pytest.raises(InvalidValueError, match="give policy= or init_scale="):
        chosen_policy(policy, {"init_scale": 8.0})
    with pytest.raises(InvalidTypeError, match="policy must be an instance"):
        chosen_policy(DynamicScale, {})  # type: ignore[arg-type]
