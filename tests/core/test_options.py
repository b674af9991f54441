"""The options of a scaler: in the signature and the docstring of each constructor, alike."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from axes import require
from optimizers import Tree

from gradscale import GradScaler, InvalidTypeError, ShardedGradScaler

COMMON = {"policy": None, "on_skip": None, "on_update": None, "diagnose": None, "history_size": 1024}
OURS = COMMON | dict.fromkeys(("init_scale", "growth_factor", "backoff_factor", "growth_interval", "backend"))
OURS["enabled"] = True


def assert_shown(constructor: Any, options: dict[str, Any]) -> None:
    shown = inspect.signature(constructor).parameters
    named = {name: each.default for name, each in shown.items() if each.kind is inspect.Parameter.KEYWORD_ONLY}
    assert {name: named[name] for name in options} == options
    assert not any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in shown.values())
    documented = constructor.__doc__.partition("Parameters\n")[2].partition("\n\n")[0]
    assert all(name in documented for name in shown)


def test_every_constructor_shows_every_option() -> None:
    for constructor in (GradScaler, ShardedGradScaler):
        assert_shown(constructor, OURS)


@pytest.mark.torch
def test_torchs_replacements_show_those_that_they_share() -> None:
    require("torch")
    import gradscale_torch

    for constructor in (gradscale_torch.GradScaler, gradscale_torch.ShardedGradScaler):
        assert_shown(constructor, COMMON)


class Hiding:
    """Hide."""

    def __init__(self, **options: Any) -> None:
        """Take anything."""


class Untold:
    """Take an option that is not documented."""

    def __init__(self, *, policy: Any = None) -> None:
        """Take it."""


@pytest.mark.parametrize("kind", [Hiding, Untold])
def test_a_constructor_that_hides_an_option_is_found(kind: Any) -> None:
    with pytest.raises((AssertionError, KeyError)):
        assert_shown(kind, {"policy": None})


def test_a_name_that_is_no_option_is_an_error() -> None:
    for make in (GradScaler, lambda **options: ShardedGradScaler(group=None, **options)):
        with pytest.raises(InvalidTypeError, match=r"unexpected keyword arguments \['growth'\]") as caught:
            make(growth=2.0)
        assert isinstance(caught.value, TypeError)
        with pytest.raises(InvalidTypeError, match="did you mean 'growth_factor'"):
            make(grow_factor=2.0)
    with pytest.raises(InvalidTypeError, match=r"by name, such as init_scale=, got \(65536\.0,\)"):
        GradScaler(65536.0)  # type: ignore[misc]
    with pytest.raises(InvalidTypeError, match=r"missing a required (keyword-only )?argument: 'group'"):
        ShardedGradScaler()  # type: ignore[call-arg]


@pytest.mark.numpy
def test_a_norm_without_its_name_is_an_error() -> None:
    with pytest.raises(InvalidTypeError, match=r"unscale_\(\) takes .* by name, such as max_norm=, got \(1\.0,"):
        GradScaler().unscale_(Tree([]), 1.0)  # type: ignore[arg-type]
