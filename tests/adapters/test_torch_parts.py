"""The parts of torch's scalers, each by itself: the live state, the unscaler and the verdict."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest
from axes import require

from gradscale import DynamicScale, ScaleState, StaticScale
from gradscale.core.vector import Verdict
from gradscale.reports.recorder import Reports
from gradscale.scaler.agreement import Agreement
from gradscale.scaler.iteration import Iteration, Parts

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def torch() -> Any:
    return require("torch")


@pytest.fixture
def live(torch: Any) -> Any:
    from gradscale_torch.state import TensorState

    made = TensorState(DynamicScale(init_scale=8.0, growth_interval=2), "cpu")
    made.current(torch.zeros(()))
    return made


@dataclasses.dataclass(frozen=True)
class NeedsTensors(StaticScale):
    """Looks at a value, which plain numbers do not have while they are traced."""

    def update(self, state: ScaleState, *, nonfinite: Any) -> ScaleState:  # type: ignore[override]
        return state._replace(scale=state.scale / 2) if bool(nonfinite) else state


# The live state.


def test_the_tensors_stay_the_same_ones(torch: Any, live: Any) -> None:
    assert live.current() == (8.0, 0, 0, 0)
    live.advance([torch.zeros(())])
    tensors = live.tensors()
    assert [tensor.item() for tensor in tensors] == [8.0, 1, 0, 0]
    live.advance([torch.zeros(())])
    live.advance([torch.ones(())])
    live.replace_scale(4.0)
    # The same tensors, which a framework may hold on to.
    assert all(now is before for now, before in zip(live.tensors(), tensors, strict=True))
    assert (tensors.scale.item(), tensors.growth_tracker.item()) == (4.0, 0)
    assert live.numbers() == {"scale": 4.0, "growth_tracker": 0, "overflow_tracker": 0, "rescale_tracker": 0}


@pytest.mark.parametrize("scale", [3.0, 2.0**-120, 1.2345e30, 2.0**127])
def test_the_reciprocal_of_the_scale_is_rounded_once(torch: Any, scale: float) -> None:
    from gradscale_torch import kernels

    rounded = torch.tensor(scale)
    assert kernels.inverse_of(rounded).item() == rounded.double().reciprocal().float().item()


def test_a_policy_that_needs_tensors_keeps_them_from_the_beginning(torch: Any) -> None:
    from gradscale_torch.state import TensorState

    live = TensorState(NeedsTensors(8.0), "cpu")
    assert isinstance(live.current(torch.zeros(())).scale, torch.Tensor)
    live.advance([torch.ones(())])
    assert live.scale() == 4.0


def test_settings_and_checkpoints_replace_what_numbers_are_updated_by(torch: Any, live: Any) -> None:
    live.replace_setting("growth_interval", 1)
    live.advance([torch.zeros(())])
    assert live.scale() == 16.0
    live.load(NeedsTensors(8.0), {"scale": 2.0, "growth_tracker": 0}, keep=False)
    live.advance([torch.ones(())])
    assert live.scale() == 1.0
    copied = pickle.loads(pickle.dumps(live))
    assert (copied.is_made, copied.numbers()["scale"]) == (False, 1.0)


@pytest.mark.parametrize("kind", ["torch's", "ours"])
def test_what_a_host_writes_to_the_scale_between_scaling_and_unscaling_holds(torch: Any, kind: str) -> None:
    import gradscale_torch

    cls = torch.amp.GradScaler if kind == "torch's" else gradscale_torch.GradScaler
    scaler = cls("cpu", init_scale=8.0)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    scaler._scale.fill_(4.0)
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [2.0, 2.0]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


# The unscaler and the verdict.


@pytest.mark.parametrize("form", ["numbers", "tensors"])
@pytest.mark.parametrize(("bad", "count"), [(1.0, 0), (math.inf, 1), (math.nan, 1)])
def test_gradients_are_unscaled_judged_and_agreed_on_alone(
    torch: Any, live: Any, form: str, bad: float, count: int
) -> None:
    from gradscale_torch.state import TensorScaling
    from gradscale_torch.unscaler import TensorUnscaler
    from gradscale_torch.verdicts import TensorVerdict

    if form == "tensors":
        live.tensors()
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[0].grad, parameters[1].grad = torch.full((2,), 8.0), torch.tensor([8.0 * bad, 16.0])
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    unscaler = TensorUnscaler("cpu", allows_fp16=False, timeout=1.0)
    gradients = unscaler.collect(optimizer)
    assert (gradients.is_touched, gradients.groups, gradients.like is parameters[0].grad) == (False, (), True)
    found = unscaler.unscale(gradients, live, live.current())
    assert (gradients.is_touched, found.count, found.norm) == (True, count, None)
    assert parameters[0].grad.tolist() == [1.0, 1.0]
    parts = Parts(live, TensorScaling(keeps_dtype=False), unscaler, Agreement(), Reports(), TensorVerdict)
    pending = TensorVerdict(Iteration(3, parts), found, live.current(), ())
    assert pending.verdict() == Verdict(count, count, False, 8.0)
    assert (pending.is_read_later, pending.has_arrived(), int(pending.count())) == (False, True, count)
    [shown] = pending.show().values()
    assert shown.item() == float(count > 0)
    # What a host says instead counts.
    pending.override({torch.device("cpu"): 1.0 - shown})
    assert (pending.verdict().nonfinite > 0) is (count == 0)
    live.advance([pending.count()])
    assert live.scale() == (4.0 if count == 0 else 8.0)


@pytest.mark.parametrize("is_recording", [True, False], ids=["recording", "not recording"])
def test_autograd_does_not_see_the_unscaling_and_records_as_before(torch: Any, is_recording: bool) -> None:
    from gradscale_torch import GradScaler

    weight = torch.ones(3, requires_grad=True)
    # As after backward(create_graph=True).
    weight.grad = weight * 8.0
    scaler, optimizer = GradScaler("cpu", init_scale=4.0), torch.optim.SGD([weight])
    before = weight.grad.grad_fn
    with torch.set_grad_enabled(is_recording):
        scaler.scale(torch.ones(()))
        norm = scaler.unscale_(optimizer, max_norm=1e9)
        assert torch.is_grad_enabled() is is_recording
    assert not norm.requires_grad
    assert weight.grad.tolist() == [2.0] * 3
    assert weight.grad.grad_fn is before


class TestFlagsThatKernelsHaveLeftZero:
    """The unscaler gives a flag to the next kernel only if nobody else has it and it is 0."""

    @pytest.fixture
    def unscaled(self, torch: Any, live: Any) -> Any:
        from gradscale_torch.unscaler import TensorUnscaler

        unscaler = TensorUnscaler("cpu", allows_fp16=False, timeout=1.0)

        def unscaled(value: float) -> Any:
            parameter = torch.nn.Parameter(torch.zeros(2))
            parameter.grad = torch.full((2,), value)
            return unscaler.unscale(unscaler.collect(torch.optim.SGD([parameter])), live, live.current())

        return unscaled

    def test_an_overflow_is_not_found_again(self, unscaled: Any) -> None:
        assert [unscaled(value).count for value in (1.0, 1.0, math.inf, 1.0, math.nan, math.nan, 1.0)] == [
            *(0, 0, 1, 0, 1, 1, 0)
        ]

    @pytest.mark.parametrize("value", [1.0, math.inf], ids=["clean", "overflow"])
    def test_what_is_shown_stays_as_it_is(self, unscaled: Any, value: float) -> None:
        [shown] = unscaled(value).flags.values()
        unscaled(math.inf)
        assert shown.item() == float(value == math.inf)
        # As a host does who wants the step to be skipped.
        shown.fill_(1.0)
        assert unscaled(1.0).count == 0

    def test_a_kernel_that_fails_leaves_none(self, torch: Any, unscaled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(*args: Any) -> None:
            args[1].fill_(1.0)
            raise RuntimeError("out of memory")

        unscaled(1.0)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", failing)
            with pytest.raises(RuntimeError, match="out of memory"):
                unscaled(1.0)
        assert unscaled(1.0).count == 0

    def test_none_is_kept_that_only_inference_may_write_to(
        self, torch: Any, unscaled: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> None:
            raise NotImplementedError

        with torch.inference_mode():
            assert unscaled(1.0).count == 0
        # Where a device has no kernel, the flag is written to by a function that looks at this.
        monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", refuse)
        assert unscaled(math.inf).count == 1
