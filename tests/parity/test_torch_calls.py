"""Call by call what torch's scalers do: signatures, cuda without CUDA, disabled scalers, and what scale() returns."""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axes_torch import torch
from small_torch import Small, assert_same

from gradscale import GradscaleError, InvalidValueError

pytestmark = pytest.mark.torch

WARNING = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."
Pair = tuple[Any, Any]


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this be a machine without CUDA."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)


@pytest.fixture
def makers(group: None, pair: Pair) -> list[Any]:  # noqa: ARG001
    """Return what makes our scaler and torch's for the CPU, in a world of one."""
    return [functools.partial(make, "cpu") for make in pair]


# Signatures.


def check_signature(ours: Any, theirs: Any, but: str = "") -> None:
    """Check that a function takes torch's arguments, of which one may have another default, and options of its own."""
    mine, wanted = ([*inspect.signature(each).parameters.values()] for each in (ours, theirs))
    for one, other in zip(mine, wanted, strict=False):
        assert (one.name, one.kind) == (other.name, other.kind), theirs
        assert one.default == other.default or one.name == but, theirs
    assert len(mine) >= len(wanted)
    for parameter in mine[len(wanted) :]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, theirs
        assert parameter.default is not inspect.Parameter.empty, theirs


def test_every_public_method_of_torchs_and_the_constructor_take_torchs_arguments(pair: Pair) -> None:
    ours, theirs = pair
    check_signature(ours, theirs, but="process_group")
    names = [name for name, value in inspect.getmembers(theirs) if callable(value) and not name.startswith("_")]
    assert len(names) >= 13
    for name in names:
        check_signature(getattr(ours, name), getattr(theirs, name))


def test_positional_arguments_mean_what_they_mean_at_torchs(classes: dict[str, Pair]) -> None:
    for name, arguments in {"GradScaler": (8.0, 3.0, 0.25, 7), "ShardedGradScaler": (8.0, 0.25, 3.0, 7)}.items():
        ours, theirs = (make("cpu", *arguments, True) for make in classes[name])
        assert ours.state_dict() == theirs.state_dict()
        assert (ours.get_growth_factor(), ours.get_backoff_factor()) == (3.0, 0.25)
        assert not any(make("cpu", *arguments, False).is_enabled() for make in classes[name])


def test_ours_is_an_instance_of_torchs_gradscaler(pair: Pair) -> None:
    assert issubclass(pair[0], torch.amp.GradScaler)
    assert isinstance(pair[0]("cpu"), torch.amp.GradScaler)


# cuda without CUDA.


def warned_by(make: Any, *arguments: Any, **options: Any) -> tuple[Any, list[warnings.WarningMessage]]:
    """Return a scaler made in this file, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler = make(*arguments, **options)
    return scaler, caught


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("arguments", [(), ("cuda",)], ids=["default", "named"])
def test_cuda_without_cuda_warns_as_torch_does_and_is_disabled(pair: Pair, arguments: tuple[str, ...]) -> None:
    ours, theirs = (warned_by(make, *arguments) for make in pair)
    for scaler, caught in (ours, theirs):
        assert not scaler.is_enabled()
        assert [(each.category, str(each.message)) for each in caught] == [(UserWarning, WARNING)]
    # The caller's line, which torch's ShardedGradScaler does not reach, nor its GradScaler in torch 2.6.
    assert Path(ours[1][0].filename) == Path(__file__)
    if Path(theirs[1][0].filename) == Path(__file__):
        assert (ours[1][0].filename, ours[1][0].lineno) == (theirs[1][0].filename, theirs[1][0].lineno)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("arguments", "options"),
    [(("cuda",), {"enabled": False}), (("cpu",), {}), (("cpu",), {"enabled": False}), (("xpu",), {})],
    ids=["cuda-disabled", "cpu", "cpu-disabled", "xpu"],
)
def test_other_devices_do_not_warn_as_at_torchs(
    pair: Pair, arguments: tuple[str, ...], options: dict[str, Any]
) -> None:
    ours, theirs = (warned_by(make, *arguments, **options) for make in pair)
    assert (ours[1], theirs[1]) == ([], [])
    assert ours[0].is_enabled() is theirs[0].is_enabled()


@pytest.mark.parametrize("device", ["nonsense", "cdua", "cpu:", "gpu", "", "cuda:x", 1.5], ids=repr)
def test_a_device_that_does_not_exist_is_named_where_torch_takes_it(pair: Pair, device: Any) -> None:
    ours, theirs = pair
    assert theirs(device).is_enabled()
    with pytest.raises(GradscaleError, match="device") as caught:
        ours(device)
    assert repr(device) in str(caught.value)


# Disabled.


FACTORS: list[dict[str, float]] = [
    *({"growth_factor": value} for value in (1.0, 0.5)),
    *({"backoff_factor": value} for value in (1.0, 2.0)),
]


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("options", [*FACTORS, {"init_scale": 0.0}, {"growth_interval": 0}], ids=str)
def test_a_disabled_scaler_takes_any_factors_as_torchs_does(pair: Pair, options: dict[str, Any]) -> None:
    for make in pair:
        assert not make("cpu", enabled=False, **options).is_enabled()
        assert not warned_by(make, "cuda", **options)[0].is_enabled()


@pytest.mark.parametrize("options", FACTORS, ids=str)
def test_an_enabled_scaler_refuses_the_factors_that_torchs_refuses(pair: Pair, options: dict[str, Any]) -> None:
    ours, theirs = pair
    with pytest.raises(AssertionError, match="factor"):
        theirs("cpu", **options)
    with pytest.raises(InvalidValueError, match=next(iter(options))):
        ours("cpu", **options)


def test_a_disabled_scaler_passes_everything_through_as_torchs_does(makers: list[Any]) -> None:
    seen = []
    for make in makers:
        scaler = make(enabled=False)
        run = Small(scaler, start=1.0)
        run.put(torch.tensor([0.5, float("inf")]))
        for outputs in (torch.ones(2), [torch.ones(())], {"a": 1}, "text", None, 3, iter([1])):
            assert scaler.scale(outputs) is outputs
        before = [
            *[scaler.unscale_(run.optimizer) for _ in range(2)],
            scaler.step(run.optimizer),
            scaler.step(run.optimizer, lambda: torch.full((), 7.0)),
            scaler.step(run.optimizer, closure=lambda: torch.full((), 8.0)),
            *[scaler.update(*arguments) for arguments in ((), (3.0,), ("nonsense",))],
            *[scaler.load_state_dict(state) for state in ({}, {"scale": 2.0})],
            *[run.state, scaler.is_enabled(), scaler.state_dict(), scaler._enabled, scaler._device],
        ]
        if "process_group" not in inspect.signature(make).parameters:
            restored = [pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)]
            before += [(each.is_enabled(), each.get_scale(), each.state_dict()) for each in restored]
        seen.append([before, run.parameter, run.parameter.grad])
    assert_same(*seen)


@pytest.mark.parametrize("variant", ["AdamW", "AdamW-fused"])
def test_a_disabled_scaler_steps_a_fused_optimizer_as_torchs_does(makers: list[Any], variant: str) -> None:
    seen = []
    for make in makers:
        run = Small(make(enabled=False), variant, start=1.0, lr=0.5)
        for gradient in (3.0, -1.0):
            run.iterate(gradient, explicit=True)
        seen.append([run.parameter, run.optimizer.state_dict(), hasattr(run.optimizer, "found_inf")])
    assert_same(*seen)


# scale().

DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "int32", "int64", "uint8", "bool"]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [2.0**16, 3.0])
def test_what_scale_returns_is_torchs(makers: list[Any], dtype: str, shape: tuple[int, ...], scale: float) -> None:
    tensor = torch.full(shape, 5, dtype=getattr(torch, dtype))
    ours, theirs = (make(init_scale=scale) for make in makers)
    assert_same(ours.scale(tensor), theirs.scale(tensor))
    assert_same(ours.scale([tensor, (tensor,)]), theirs.scale([tensor, (tensor,)]))
    assert_same(ours._scale, theirs._scale)
    assert tensor.eq(torch.full(shape, 5, dtype=tensor.dtype)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_only_the_sharded_scaler_keeps_the_dtype_of_a_half_loss(makers: list[Any], pair: Pair, dtype: str) -> None:
    loss = torch.ones((), dtype=getattr(torch, dtype))
    kept = loss.dtype if pair[0].__name__ == "ShardedGradScaler" else torch.float32
    assert makers[0]().scale(loss).dtype is kept
    assert makers[0]().scale([loss])[0].dtype is kept


def test_scaled_losses_are_differentiable_as_torchs(makers: list[Any]) -> None:
    gradients = []
    for make in makers:
        leaf = torch.tensor([1.0, 2.0], requires_grad=True)
        first, [second] = make(init_scale=3.0).scale(((leaf * leaf).sum(), [leaf.sum()]))
        (first + second).backward()
        gradients.append(leaf.grad)
    assert_same(*gradients)
    assert gradients[0].tolist() == [9.0, 15.0]


class Losses(list):  # type: ignore[type-arg]
    """A list of the user's."""


@pytest.mark.parametrize(
    "container",
    [list, tuple, Losses, lambda parts: [[tuple(parts)], []], lambda _: [], lambda _: ()],
    ids=["list", "tuple", "subclass", "nested", "empty-list", "empty-tuple"],
)
def test_containers_come_back_as_torchs(makers: list[Any], container: Any) -> None:
    ours, theirs = (make() for make in makers)
    scaled = [scaler.scale(container([torch.ones(()), torch.ones(2)])) for scaler in (ours, theirs)]
    assert_same(*scaled)
    assert_same(ours._scale, theirs._scale)


@pytest.mark.parametrize(
    "make_iterable", [iter, lambda parts: (x for x in parts), set], ids=["iterator", "generator", "set"]
)
def test_other_iterables_are_scaled_when_they_are_consumed_as_torchs(makers: list[Any], make_iterable: Any) -> None:
    for make in makers:
        scaler = make(init_scale=4.0)
        lazy = scaler.scale(make_iterable([torch.ones(()), torch.ones(())]))
        assert iter(lazy) is lazy
        assert scaler._scale is None
        assert next(lazy).item() == 4.0
        assert scaler._scale.item() == 4.0
        assert [each.item() for each in lazy] == [4.0]


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "in-a-later-iteration"])
def test_an_iterator_counts_as_scaled_when_it_is_consumed(makers: list[Any], later: bool) -> None:
    for make in makers:
        run = Small(make(init_scale=4.0, growth_interval=1), size=1)
        lazy = run.scaler.scale(iter([run.parameter.sum()]))
        if later:
            run.iterate(1.0)
            run.optimizer.zero_grad()
        next(lazy).backward()
        run.step()
        assert (run.held, run.parameter.grad.item()) == ([[-2.0 if later else -1.0]], 1.0)


@pytest.mark.parametrize("outputs", [3, 1.5, None, object()], ids=["int", "float", "none", "object"])
@pytest.mark.parametrize("nested", [False, True], ids=["bare", "nested"])
def test_what_is_no_tensor_is_torchs_error(makers: list[Any], outputs: Any, nested: bool) -> None:
    messages = []
    for make in makers:
        with pytest.raises(ValueError, match="outputs must be a Tensor") as caught:
            make().scale([torch.ones(()), outputs] if nested else outputs)
        messages.append(str(caught.value))
    assert messages[0].startswith(messages[1])


Pair = collections.namedtuple("Pair", "first second")


def test_named_tuples_and_dicts_fail_or_lose_their_values_at_torchs_and_not_at_ours(makers: list[Any]) -> None:
    ours, theirs = (make(init_scale=4.0) for make in makers)
    with pytest.raises(TypeError):
        theirs.scale(Pair(torch.ones(()), torch.ones(())))
    assert ours.scale(Pair(torch.ones(()), torch.ones(()))) == Pair(torch.full((), 4.0), torch.full((), 4.0))
    with pytest.raises(ValueError, match="outputs must"):
        list(theirs.scale({1: torch.ones(())}))
    assert ours.scale({1: torch.ones(()), "a": [torch.ones(())]}) == {
        1: torch.full((), 4.0),
        "a": [torch.full((), 4.0)],
    }
    with pytest.raises(RecursionError):
        collections.deque(_flattened(theirs.scale("text")))
    with pytest.raises(InvalidValueError, match="text"):
        ours.scale("text")


def _flattened(values: Any) -> Iterator[Any]:
    for value in values:
        yield from _flattened(value)
