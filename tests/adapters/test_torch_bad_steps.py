"""Spikes and refused steps on devices that are slower than the host, and in captured graphs: no host read."""

from __future__ import annotations

import math

import pytest
from axes_torch import GradScaler, StepGuard, TorchScaler, torch
from host_cuda import installed
from small_torch import Small, groups_in_use
from torch.amp.grad_scaler import OptState

import gradscale

pytestmark = pytest.mark.torch

RULE = gradscale.SkipSpikes(window=4, min_values=2, of="norm")
GRADIENTS = (1.0, 1.0, 1.0, 5.0, 1.0, math.inf, 1.0)
REASONS = ["stepped"] * 3 + ["spike", "stepped", "overflow", "stepped"]
# It grows at each clean step.
SCALES = [8.0, 16.0, 32.0, 32.0, 64.0, 32.0, 64.0]


@pytest.fixture(autouse=True)
def cuda():
    """Return the stand-in for two CUDA devices."""
    with installed() as cuda:
        yield cuda


def made(name: str, *devices: str, groups: int = 0, **settings) -> Small:
    """Return a run on devices, over groups that have compared their versions, for which the host waits."""
    scaler = GradScaler("cuda", init_scale=4.0, growth_interval=1, group=groups_in_use(groups), **settings)
    options = {"capturable": True} if "Adam" in name else {}
    return Small(scaler, name, devices=devices, home=devices[0], **options)


def clipped(run: Small, gradient: float):
    """Make an iteration with clipping, whose norm is twice the gradient for two parameters of two elements."""
    run.give(gradient)
    run.scaler.unscale_(run.optimizer, max_norm=100.0)
    run.step()


def test_a_rule_for_spikes_says_that_a_framework_leaves_it_nothing_to_judge():
    run = made("SGD", "cuda", skip=RULE)
    run.give(1.0)
    state = run.scaler._per_optimizer_states[id(run.optimizer)]
    state["stage"], state["found_inf_per_device"] = OptState.UNSCALED, {torch.device("cuda"): torch.zeros(1)}
    with pytest.warns(UserWarning, match="skip= judges norm, and found nothing in this step.* call unscale_"):
        run.step()
    assert run.report.reason == "stepped"


def test_a_captured_graph_judges_and_learns_in_each_replay(cuda):
    run = made("AdamW-fused", "cuda", skip=RULE)
    for gradient in (1.0, 1.0):
        clipped(run, gradient)
    source = torch.ones(2, device="cuda")
    run.scaler.scale(source)
    with cuda.capture() as graph:
        run.parameter.grad.copy_(source * run.scaler._scale)
        run.scaler.unscale_(run.optimizer, max_norm=100.0)
        run.step()
    seen = []
    for value in GRADIENTS[2:]:
        source.fill_(value)
        graph.replay()
        seen.append((run.report.reason, run.scaler.get_scale()))
    assert seen == list(zip(REASONS[2:], SCALES[2:], strict=True))
    # The values of the two steps before, and of the replays that were made.
    window = run.scaler.state_dict()["spikes"][0]["norm"]
    assert window == {"values": [pytest.approx(2.0**0.5)] * 4, "skipped": 0}
    # Replays go on with what was loaded.
    run.scaler.load_state_dict(run.scaler.state_dict() | {"spikes": []})
    source.fill_(5.0)
    graph.replay()
    assert run.report.reason == "stepped"


@pytest.mark.parametrize("name", ["SGD", "SGD-fused"])
def test_looks_at_gradients_are_not_warned_of_and_keep_the_spike_of_their_norm(name: str):
    run = Small(GradScaler("cpu", skip=gradscale.SkipSpikes(of="norm", above=10.0)), name)
    run.give(1000.0)
    run.scaler._check_inf_per_device(run.optimizer)
    run.scaler.unscale_(run.optimizer, max_norm=1e9)
    run.scaler._check_inf_per_device(run.optimizer)
    run.step()
    assert run.report.reason == "spike"
    # The norm of a step by itself is not known.
    run.give(1.0)
    with pytest.warns(UserWarning, match="found nothing in this step"):
        run.step()


@pytest.mark.parametrize("name", ["SGD", "SGD-fused"])
def test_a_second_look_at_gradients_divides_them_by_no_scale_below_one(name: str):
    run = Small(GradScaler("cpu", init_scale=2.0**-100), name)
    run.give(2.0**30)
    run.scaler.unscale_(run.optimizer)
    found = run.scaler._check_inf_per_device(run.optimizer)
    assert [value.item() for value in found.values()] == [0.0]
    run.step()
    assert (run.report.reason, run.scaler.get_scale()) == ("stepped", 2.0**-100)


def test_windows_that_begin_in_inference_mode_go_on_outside_of_it():
    scaler = GradScaler("cpu", skip=gradscale.SkipSpikes(window=4, of="loss"))
    for _ in range(2):
        run = Small(scaler)
        run.give(1.0)
        with torch.inference_mode():
            scaler.unscale_(run.optimizer)
        run.step()
    assert [window["loss"]["values"] for window in scaler.state_dict()["spikes"]] == [[1.0, 1.0]]


class Flagged:
    """A wrapper that skips by itself, and has no state."""

    _step_supports_amp_scaling = True

    def __init__(self, optimizer):
        self.inner, self.param_groups = optimizer, optimizer.param_groups

    def step(self):
        self.inner.grad_scale, self.inner.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
        self.inner.step()
        del self.inner.grad_scale, self.inner.found_inf


class Around:
    """A wrapper that has whatever its optimizer has, and a step of its own or that of the optimizer."""

    def __init__(self, optimizer, is_called: bool = False):
        self.inner = optimizer
        if is_called:
            self.step, self.optimizer = lambda: optimizer.step(), optimizer

    def __getattr__(self, name: str):
        return getattr(self.__dict__["inner"], name)


@pytest.mark.parametrize("wrap", [Flagged, Around, lambda optimizer: Around(optimizer, is_called=True)])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_fused_optimizer_in_a_wrapper_takes_unscaled_gradients_and_no_bad_step(wrap, explicit: bool):
    run = Small(GradScaler("cpu"), "SGD-fused", start=1.0, lr=0.5, momentum=0.5)
    wrapped = wrap(run.optimizer)
    for gradient, weight in ((1.0, 0.5), (math.nan, 0.5), (1.0, -0.25)):
        run.give(gradient)
        if explicit:
            run.scaler.unscale_(wrapped)
        run.scaler.step(wrapped)
        run.scaler.update()
        assert run.held == [[weight] * 2]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("kind", ["guard of torch", "scaler of torch", "guard"])
def test_duplicates_whose_sum_overflows_and_bad_values_of_eight_bits_skip_the_step(kind: str):
    makers = {"guard of torch": StepGuard, "guard": gradscale.StepGuard}
    for bad in (
        torch.sparse_coo_tensor([[1, 1]], torch.full((2,), 40000.0, dtype=torch.float16), (4,)),
        torch.full((4,), math.nan).to(torch.float8_e4m3fn),
    ):
        scaler = makers[kind]() if kind in makers else GradScaler("cpu", init_scale=1.0, allow_fp16_grads=True)
        parameter = torch.nn.Parameter(torch.zeros(4, dtype=bad.dtype))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler.scale(torch.ones(()))
        parameter.grad = bad
        scaler.step(optimizer)
        assert scaler.last_step(optimizer).reason == "overflow"


# A guard.


def test_a_guard_is_a_scaler_for_torchs_frameworks_and_takes_no_settings_of_a_scale():
    guard = StepGuard(skip=RULE)
    assert isinstance(guard, (TorchScaler, GradScaler))
    assert isinstance(guard, gradscale.StepGuard)
    assert repr(guard).startswith("StepGuard(skip=SkipSpikes(window=4")
    for name in ("device", "init_scale", "policy", "growth_interval"):
        with pytest.raises(gradscale.InvalidTypeError, match="settings of a scale are taken by GradScaler"):
            StepGuard(**{name: "cuda"})
    with pytest.raises(gradscale.InvalidTypeError, match="takes its options by name"):
        StepGuard("cuda")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("name", ["SGD", "AdamW-fused"])
def test_a_guard_leaves_losses_and_gradients_as_they_are_with_and_without_scale(name: str, device: str, dtype: str):
    options = {"capturable": True} if "Adam" in name and device != "cpu" else {}
    run = Small(StepGuard(), name, dtypes=(dtype,), devices=(device,), home=device, **options)
    for number, value in enumerate((3.0, math.nan, 3.0, math.inf, 3.0)):
        before, loss = run.held, torch.ones((), dtype=getattr(torch, dtype), device=device)
        run.parameter.grad = torch.full_like(run.parameter, value)
        if number % 2 == 0:
            assert run.scaler.scale(loss) is loss
        run.step(explicit=number > 2)
        assert (run.report.skipped, run.held == before) == (not math.isfinite(value),) * 2
        # Also where the state is on a device.
        run.scaler.load_state_dict(run.scaler.state_dict())
    assert run.scaler.counts() == {"taken": 3, "overflow": 2, "spike": 0, "refused": 0}
