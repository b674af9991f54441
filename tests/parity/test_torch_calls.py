"""Call by call what torch's scalers do: signatures, cuda without CUDA, disabled scalers, and what scale() returns."""

from __future__ import annotations

import collections
import functools
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
from axes_torch import torch

from gradscale import GradscaleError, InvalidTypeError, InvalidValueError

pytestmark = pytest.mark.torch

WARNING = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."
Pair = tuple[Any, Any]


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch):
    """Let this be a machine without CUDA."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)


@pytest.fixture
def makers(group: None, pair: Pair):  # noqa: ARG001
    """Return what makes our scaler and torch's for the CPU, in a world of one."""
    return [functools.partial(make, "cpu") for make in pair]


# Arguments.


def check_signature(ours, theirs, but: str = ""):
    """Check that a function takes torch's arguments, of which one may have another default, and options of its own."""
    mine, wanted = ([*inspect.signature(each).parameters.values()] for each in (ours, theirs))
    for one, other in zip(mine, wanted, strict=False):
        assert (one.name, one.kind) == (other.name, other.kind), theirs
        assert one.default == other.default or one.name == but, theirs
    assert len(mine) >= len(wanted)
    for parameter in mine[len(wanted) :]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, theirs
        assert parameter.default is not inspect.Parameter.empty, theirs


def test_every_public_method_of_torchs_and_the_constructor_take_torchs_arguments(pair: Pair):
    ours, theirs = pair
    assert issubclass(ours, torch.amp.GradScaler)
    check_signature(ours, theirs, but="process_group")
    names = [name for name, value in inspect.getmembers(theirs) if callable(value) and not name.startswith("_")]
    assert len(names) >= 13
    for name in names:
        check_signature(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize("value", [None, 0, 1, "", "yes", [], [0], 0.5], ids=repr)
def test_enabled_takes_any_truth_value(makers: list[Any], value):
    for make in makers:
        scaler = make(enabled=value)
        assert bool(scaler.is_enabled()) is bool(value)
        assert scaler.scale(torch.ones(())).item() == (65536.0 if value else 1.0)
    assert makers[0](enabled=torch.tensor(True)).is_enabled() is True
    with pytest.raises(InvalidTypeError, match="enabled must be true or false, got tensor"):
        makers[0](enabled=torch.ones(2))


@pytest.mark.usefixtures("group")
def test_device_is_whatever_names_one_and_what_names_none_is_refused(pair: Pair):
    for device in ("cpu", torch.device("cpu"), "meta", "xla", "hpu", None, 0, 127):
        assert [make(device).is_enabled() for make in pair] == [True, True]
    for device in ("nonsense", "cdua", "cpu:", "gpu", "", "cuda:x", 1.5, 128):
        # torch takes these, too.
        assert pair[1](device).is_enabled()
        with pytest.raises(GradscaleError, match="device") as caught:
            pair[0](device)
        assert repr(device) in str(caught.value)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ((), {}, [WARNING]),
        *((("cuda",), {}, [WARNING]), (("cuda",), {"enabled": False}, [])),
        *((("cpu",), {}, []), (("cpu",), {"enabled": False}, []), (("xpu",), {}, [])),
    ],
    ids=str,
)
def test_cuda_without_cuda_warns_as_torch_does_and_is_disabled(
    pair: Pair, arguments: tuple[str, ...], options: dict[str, Any], expected: list[str]
):
    for make in pair:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler = make(*arguments, **options)
        assert [(each.category, str(each.message)) for each in caught] == [(UserWarning, text) for text in expected]
        assert scaler.is_enabled() is (not expected and options == {})
        # The caller's line, which torch's ShardedGradScaler does not reach, nor its GradScaler in torch 2.6.
        if make is pair[0]:
            assert {Path(each.filename) for each in caught} <= {Path(__file__)}


REFUSED = [("growth_factor", 1.0), ("growth_factor", 0.5), ("backoff_factor", 1.0), ("backoff_factor", 2.0)]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_factors_that_torchs_refuses_are_refused_if_it_is_enabled(pair: Pair, name: str, value: float):
    for make, error in zip(pair, (InvalidValueError, AssertionError), strict=True):
        with pytest.raises(error, match=name.replace("_", ".")):
            make("cpu", **{name: value})
        assert not make("cpu", enabled=False, **{name: value}).is_enabled()


# scale().


Two = collections.namedtuple("Two", "first second")


def test_named_tuples_and_dicts_which_torchs_refuses_are_scaled_and_text_is_refused(makers: list[Any]):
    ours, theirs = (make(init_scale=4.0) for make in makers)
    with pytest.raises(TypeError):
        theirs.scale(Two(torch.ones(()), torch.ones(())))
    assert ours.scale(Two(torch.ones(()), torch.ones(()))) == Two(torch.full((), 4.0), torch.full((), 4.0))
    scaled = ours.scale({1: torch.ones(()), "a": [torch.ones(())]})
    assert scaled == {1: torch.full((), 4.0), "a": [torch.full((), 4.0)]}
    with pytest.raises(InvalidValueError, match="text"):
        ours.scale("text")
