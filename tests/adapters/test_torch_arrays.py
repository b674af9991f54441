"""torch tensors of every kind through the adapter: dtypes, layouts, views, complex values, and autograd's graph."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from axes_torch import GradScaler, torch
from small_torch import Small

import gradscale
from gradscale import DynamicScale
from gradscale.testing import check_backend

pytestmark = pytest.mark.torch


def refuse(*_: Any) -> None:
    raise NotImplementedError


REALS = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture
def backend() -> Any:
    """Return the adapter as it is registered."""
    return gradscale.registry.backend_for(torch.zeros(()))


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("dtype", [*REALS, "complex64", "complex128"])
def test_the_adapter_conforms_to_the_pure_core(backend: Any, dtype: str) -> None:
    check_backend(backend, torch.zeros(1), dtypes=[getattr(torch, dtype)])


@pytest.mark.tier("ranks")
def test_the_adapter_conforms_where_the_device_has_no_kernels(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", refuse)
    check_backend(backend, torch.zeros(1), dtypes=[getattr(torch, dtype) for dtype in REALS])


def test_what_else_fails_in_the_kernel_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", fail)
    grad = torch.full((3,), 8.0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        in_place([grad])
    assert grad.tolist() == [8.0] * 3


class NeedsTensors(gradscale.StaticScale):
    """Looks at a value, which plain numbers do not have while they are traced."""

    def update(self, state: Any, *, nonfinite: Any) -> Any:
        return state._replace(scale=state.scale / 2) if bool(nonfinite) else state


def test_a_policy_may_look_at_the_verdict() -> None:
    run = Small(GradScaler("cpu", policy=NeedsTensors(8.0)))
    for gradient in (1.0, float("inf"), 1.0):
        run.iterate(gradient)
    assert run.state == (4.0, 0)
    assert pickle.loads(pickle.dumps(run.scaler)).get_scale() == 4.0


@pytest.mark.parametrize("scale", [3.0, 2.0**-120, 2.0**-100, 1.2345e30, 2.0**127])
def test_the_reciprocal_of_the_scale_is_rounded_once(scale: float) -> None:
    from gradscale_torch import kernels

    rounded = torch.tensor(scale)
    assert kernels.inverse_of(rounded).item() == rounded.double().reciprocal().float().item()


def state_of(scale: float) -> Any:
    return DynamicScale(init_scale=scale).init(torch.zeros(()))


def in_place(grads: list[Any], scale: float = 8.0) -> int:
    """Unscale gradients in place through the adapter, and return the count."""
    state = state_of(scale)
    got, nonfinite = gradscale.registry.backend_for(state.scale).unscale(grads, state, out=grads)
    assert all(new is old for new, old in zip(got, grads, strict=True))
    return int(nonfinite)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda torch: torch.full((6, 8), 8.0).T,
    "strided": lambda torch: torch.full((6, 8), 8.0)[::2, 1::3],
    "channels-last": lambda torch: torch.full((2, 3, 4, 5), 8.0).to(memory_format=torch.channels_last),
    "sliced": lambda torch: torch.full((4, 6), 8.0)[1:3, 2:5],
    "0-d": lambda torch: torch.full((), 8.0),
    "empty": lambda torch: torch.full((0, 3), 8.0),
    "expanded-by-nothing": lambda torch: torch.full((1, 1, 5), 8.0).expand(1, 1, 5),
}
"""Tensors in which no two elements share memory, holding 8.0 everywhere."""


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_overwritten_in_place_and_their_surroundings_are_not(name: str) -> None:
    view = VIEWS[name](torch)
    whole = view._base if view._base is not None else view
    untouched = whole.numel() - view.numel()
    assert in_place([view]) == 0
    assert (view == 1.0).all()
    assert (whole == 8.0).sum() == untouched
    if view.numel() > 0:
        view[tuple(length - 1 for length in view.shape)] = float("nan")
    assert in_place([torch.ones(3), view]) == (view.numel() > 0)


def test_a_tensor_that_overlaps_itself_is_refused_by_name() -> None:
    overlapping = torch.full((1, 3), 8.0).expand(4, 3)
    with pytest.raises(gradscale.InvalidValueError, match=r"gradient 1, shape \(4, 3\).*overlaps itself.*clone"):
        in_place([torch.ones(2), overlapping])


def test_conjugated_views_are_unscaled_once() -> None:
    base = torch.complex(torch.full((3,), 8.0), torch.full((3,), -16.0))
    assert in_place([base.conj()]) == 0
    assert base.tolist() == [1 - 2j] * 3
    base[1] = complex(0.0, float("inf"))
    assert in_place([base.conj()]) == 1


def test_new_tensors_stay_in_autograds_graph_and_given_ones_do_not() -> None:
    weight = torch.tensor([2.0], requires_grad=True)
    state = state_of(8.0)
    (unscaled,), _ = gradscale.unscale([weight * 24.0], state)
    unscaled.backward()
    assert weight.grad.item() == 3.0
    leaf = torch.tensor([8.0], requires_grad=True)
    assert in_place([leaf]) == 0
    assert (leaf.item(), leaf.grad_fn, leaf.requires_grad) == (1.0, None, True)


@pytest.mark.parametrize(("scale", "passes"), [(1.0, 1), (65536.0, 1), (0.5, 2)])
def test_gradients_are_read_twice_only_where_the_quotient_may_overflow(
    monkeypatch: pytest.MonkeyPatch, scale: float, passes: int
) -> None:
    kernel = torch._amp_foreach_non_finite_check_and_unscale_
    calls = []

    def counted(*args: Any) -> None:
        calls.append(len(args[0]))
        kernel(*args)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", counted)
    assert in_place([torch.ones(3), torch.ones(2)], scale) == 0
    assert calls == [2] * passes


@pytest.mark.tier("all")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_the_functional_core_compiles_without_a_break() -> None:
    policy = DynamicScale(growth_interval=2)

    def step(grads: Any, state: Any) -> Any:
        grads, nonfinite = gradscale.unscale(grads, state)
        return grads, policy.update(state, nonfinite=nonfinite)

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for bad in (1.0, float("inf"), float("nan")):
        state = policy.init(torch.zeros(()))
        grads = [torch.tensor([3.0, bad]), torch.ones(2, dtype=torch.float16)]
        for ours, eager in zip(_leaves(compiled(grads, state)), _leaves(step(grads, state)), strict=True):
            assert torch.equal(ours, eager) or torch.isnan(ours).any()


def _leaves(tree: Any) -> list[Any]:
    return gradscale.tree.flatten(tree)[0]


def test_dtensors_are_refused_by_the_functional_core_with_what_to_do() -> None:
    class Sharded(torch.Tensor):
        device_mesh = "a mesh"

    with pytest.raises(gradscale.InvalidTypeError, match=r"gradscale_torch\.GradScaler"):
        in_place([torch.ones(2).as_subclass(Sharded)])


@pytest.mark.parametrize("wanted", ["float32", "float64"])
@pytest.mark.parametrize("given", REALS)
def test_masters_get_what_the_pure_core_computes(given: str, wanted: str) -> None:
    grads = [torch.tensor([1.0, -3.5, 1e-7, 6e4], dtype=getattr(torch, given))]
    masters = [torch.zeros(4, dtype=getattr(torch, wanted))]
    state = state_of(3.0)
    before = grads[0].clone()
    (expected,), count = gradscale.core.arithmetic.unscale_arrays(grads, state, out=masters)
    got, nonfinite = gradscale.unscale(grads, state, out=masters)
    assert got[0] is masters[0]
    assert torch.equal(masters[0], expected)
    assert torch.equal(grads[0], before)
    assert int(nonfinite) == int(count)
