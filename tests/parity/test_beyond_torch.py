"""What torch's scalers get wrong in one process, shown on the same script first: scales, reports, fused optimizers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch_runs import assert_same

from gradscale.scaler.scaler import iteration_of

pytestmark = pytest.mark.torch

VARIANTS = ["single", "foreach", "fused"]


def optimizer_of(torch: Any, name: str, variant: str, parameters: list[Any], **options: Any) -> Any:
    """Return one of torch's optimizers in one of its implementations."""
    switches = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[variant]
    return getattr(torch.optim, name)(parameters, **{"lr": 1.0, **options}, **switches)


def iterate(torch: Any, scaler: Any, optimizer: Any, parameter: Any, gradient: Any, explicit: bool = False) -> Any:
    """Make one iteration with this unscaled gradient, and return what ``step`` returned."""
    factor = scaler.scale(torch.ones(()))
    parameter.grad = (torch.ones_like(parameter) * gradient * factor).to(parameter.dtype)
    if explicit:
        scaler.unscale_(optimizer)
    returned = scaler.step(optimizer)
    scaler.update()
    return returned


# The scale.


@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.7, 0.3), (16.0, 2.0**-20)], ids=str)
def test_a_scale_that_falls_and_falls_reaches_zero_at_torchs_and_recovers_at_ours(
    torch: Any, ours: Any, theirs: Any, factors: tuple[float, float]
) -> None:
    final = []
    for make in (theirs, ours):
        scaler = make("cpu", init_scale=2.0**10, growth_factor=factors[0], backoff_factor=factors[1], growth_interval=1)
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        for _ in range(300):
            iterate(torch, scaler, optimizer, parameter, math.inf)
        lowest = scaler.get_scale()
        for _ in range(300):
            iterate(torch, scaler, optimizer, parameter, 1.0)
        final.append((lowest, scaler.get_scale(), parameter[0].item()))
    (their_lowest, their_scale, their_parameter), (lowest, scale, value) = final
    assert (their_lowest, their_scale) == (0.0, 0.0)
    assert math.isnan(their_parameter)
    assert lowest == 2.0**-126
    assert 2.0**126 > scale > 1.0 or scale > 2.0**100
    # Gradients of 1 survive a tiny scale in float32, but for rounding.
    assert value == pytest.approx(-300.0, rel=1e-5)


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("scale", [2.0**-10, 0.001], ids=["power-of-two", "other"])
def test_a_gradient_that_overflows_when_divided_ruins_the_weights_at_torchs_and_is_skipped_at_ours(
    torch: Any, ours: Any, theirs: Any, scale: float, name: str, variant: str, explicit: bool
) -> None:
    for make in (theirs, ours):
        scaler = make("cpu", init_scale=scale)
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = optimizer_of(torch, name, variant, [parameter], lr=0.5)
        scaler.scale(torch.ones(()))
        parameter.grad = torch.tensor([1e37, 0.0])
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if make is theirs:
            assert not math.isfinite(parameter[0].item())
            assert scaler._get_growth_tracker() == 1
            continue
        assert parameter.tolist() == [1.0, 1.0]
        assert scaler.get_scale() == pytest.approx(scale / 2)
        assert scaler.last_step(optimizer).skipped
        assert scaler.last_step(optimizer).nonfinite == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [2.0**-10, 0.3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ordinary_gradients_at_a_scale_below_one_are_stepped_with(
    torch: Any, ours: Any, theirs: Any, variant: str, scale: float, dtype: str
) -> None:
    seen = []
    for make in (theirs, ours):
        scaler = make("cpu", init_scale=scale, growth_interval=2)
        parameter = torch.nn.Parameter(torch.ones(64, dtype=getattr(torch, dtype)))
        optimizer = optimizer_of(torch, "AdamW", variant, [parameter, torch.nn.Parameter(torch.ones(0))], lr=0.5)
        optimizer.param_groups[0]["params"][1].grad = torch.ones(0)
        ramp = torch.linspace(0.1, 3.0, 64)
        for gradient in (3.0, -1.0, math.inf, 2.0):
            iterate(torch, scaler, optimizer, parameter, gradient * ramp)
        seen.append([parameter, optimizer.state_dict(), scaler.get_scale(), scaler._get_growth_tracker()])
    assert_same(*seen)


# Steps that were skipped.


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad"])
def test_a_skipped_step_looks_like_any_other_at_torchs_and_is_reported_at_ours(
    torch: Any, ours: Any, theirs: Any, name: str, variant: str, explicit: bool
) -> None:
    events = [1.0, math.inf, 2.0, math.nan, -math.inf, 1.0]
    for make in (theirs, ours):
        scaler = make("cpu")
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
        optimizer = optimizer_of(torch, name, variant, parameters)
        returned, reports = [], []
        for gradient in events:
            for parameter in parameters[1:]:
                parameter.grad = torch.full((2,), gradient)
            returned.append(iterate(torch, scaler, optimizer, parameters[0], 1.0, explicit))
            if make is ours:
                reports.append(scaler.last_step(optimizer))
        # Torch has nothing to tell a step from a skipped one by.
        assert returned == [None] * len(events)
        if make is theirs:
            assert not hasattr(scaler, "last_step")
            continue
        assert [report.skipped for report in reports] == [not math.isfinite(event) for event in events]
        assert [report.nonfinite for report in reports] == [0, 2, 0, 2, 2, 0]
        assert [report.scale for report in reports] == [65536.0, 65536.0, 32768.0, 32768.0, 16384.0, 8192.0]
        assert [report.iteration for report in reports] == [1, 2, 3, 4, 5, 6]
        assert [report.reason for report in reports] == [
            "stepped" if math.isfinite(event) else "overflow" for event in events
        ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_optimizer_has_its_own_report(torch: Any, ours: Any, variant: str) -> None:
    scaler = ours("cpu")
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [optimizer_of(torch, "SGD", variant, [parameter]) for parameter in parameters]
    scaler.scale(torch.ones(()))
    for parameter, gradient in zip(parameters, (math.inf, 65536.0), strict=True):
        parameter.grad = torch.tensor([gradient])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [scaler.last_step(optimizer).skipped for optimizer in optimizers] == [True, False]
    assert [parameter.item() for parameter in parameters] == [0.0, -1.0]
    assert scaler.get_scale() == 32768.0


# Fused optimizers.


class Watching:
    """An optimizer of torch's new convention, which records what it is given, and may raise.

    Parameters
    ----------
    parameters : list of tensors
        Its parameters.
    raises : bool
        Whether ``step`` raises.
    spoils : bool
        Whether it overwrites what it is given.
    """

    _step_supports_amp_scaling = True

    def __init__(self, parameters: list[Any], raises: bool = False, spoils: bool = False) -> None:
        self.param_groups = [{"params": parameters}]
        self.seen: list[tuple[Any, Any]] = []
        self._raises = raises
        self._spoils = spoils

    def step(self) -> str:
        """Record the attributes."""
        pair = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
        self.seen.append(tuple(None if value is None else value.clone() for value in pair))  # type: ignore[arg-type]
        if self._spoils:
            for value in pair:
                value.fill_(7.0)
        if self._raises:
            msg = "the optimizer failed"
            raise RuntimeError(msg)
        return "called"


@pytest.mark.parametrize("preset", [False, True], ids=["none-before", "preset"])
@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])
def test_a_fused_step_that_raises_leaves_attributes_behind_at_torchs_and_none_at_ours(
    torch: Any, ours: Any, theirs: Any, explicit: bool, preset: bool
) -> None:
    for make in (theirs, ours):
        scaler = make("cpu")
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = Watching([parameter], raises=True)
        if preset:
            optimizer.grad_scale = torch.tensor(3.0)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="the optimizer failed"):
            iterate(torch, scaler, optimizer, parameter, 1.0, explicit)
        left = [name for name in ("grad_scale", "found_inf") if name in vars(optimizer)]
        assert left == (["grad_scale", "found_inf"] if make is theirs else [])


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])
@pytest.mark.parametrize("gradient", [1.0, math.inf], ids=["finite", "inf"])
@pytest.mark.parametrize("scale", [5.0, 0.3])
def test_fused_optimizers_are_given_what_torch_gives_them(
    torch: Any, ours: Any, theirs: Any, scale: float, gradient: float, explicit: bool
) -> None:
    seen = []
    for make in (theirs, ours):
        scaler = make("cpu", init_scale=scale)
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = Watching([parameter])
        returned = iterate(torch, scaler, optimizer, parameter, gradient, explicit)
        optimizer.grad_scale = torch.tensor(3.0)  # type: ignore[attr-defined]
        iterate(torch, scaler, optimizer, parameter, gradient, explicit)
        values = [[None if value is None else float(value) for value in pair] for pair in optimizer.seen]
        kinds = [type(found) for _, found in optimizer.seen]
        seen.append([returned, values, kinds, parameter.grad, scaler.get_scale()])
    assert_same(*seen)


def test_a_fused_optimizer_cannot_change_the_scale_or_the_verdict_through_what_it_is_given(
    torch: Any, ours: Any, theirs: Any
) -> None:
    for make in (theirs, ours):
        scaler = make("cpu", init_scale=16.0, growth_interval=1)
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = Watching([parameter], spoils=True)
        iterate(torch, scaler, optimizer, parameter, 1.0)
        assert scaler.get_scale() == 32.0, make


def test_what_several_devices_have_found_is_more_than_one_at_torchs_and_exactly_one_at_ours(
    torch: Any, ours: Any, theirs: Any
) -> None:
    # What gradients on two devices that both overflow come to; fused kernels skip at exactly 1.
    from gradscale_torch.verdicts import combined

    found = {torch.device("cpu"): torch.ones(()), torch.device("cpu", 0): torch.ones(())}
    scaler = theirs("cpu")
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.tensor([math.inf, 1.0])
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
    scaler.step(optimizer)
    assert not math.isfinite(parameter[0].item())

    assert combined(found, torch.device("cpu")).item() == 1.0
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    scaler = ours("cpu")
    scaler.scale(torch.ones(()))
    parameter.grad = torch.tensor([math.inf, 1.0])
    scaler.unscale_(optimizer)
    iteration_of(scaler._scaler).turn_of(optimizer).pending._found.flags = found
    scaler.step(optimizer)
    assert parameter.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("gradients", [2, 3], ids=["2-dtypes", "3-dtypes"])
def test_several_dtypes_that_overflow_make_one_verdict_of_exactly_one(torch: Any, ours: Any, gradients: int) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16][:gradients]
    parameters = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes]
    scaler, optimizer = ours("cpu"), Watching(parameters)
    scaler.scale(torch.ones(()))
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, math.inf)
    scaler.step(optimizer)
    [(_, found)] = optimizer.seen
    assert (found.item(), found.dtype, found.shape) == (1.0, torch.float32, ())
    assert scaler.last_step(optimizer).nonfinite == gradients


def test_a_first_fused_step_that_is_skipped_leaves_no_rubbish_in_the_momentum(
    torch: Any, ours: Any, theirs: Any
) -> None:
    # Torch allocates the momentum before the kernel that skips, and then takes it for filled.
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        for make in (theirs, ours):
            scaler = make("cpu")
            parameter = torch.nn.Parameter(torch.zeros(2))
            optimizer = optimizer_of(torch, "SGD", "fused", [parameter], momentum=0.9)
            for gradient in (math.inf, 1.0, 1.0):
                iterate(torch, scaler, optimizer, parameter, gradient)
            if make is theirs:
                assert parameter.isnan().all()
            else:
                assert parameter.tolist() == pytest.approx([-2.9, -2.9])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_sharded_scaler_with_a_fused_optimizer_raises_at_torchs_and_works_at_ours(torch: Any, name: str) -> None:
    from torch.distributed.fsdp import sharded_grad_scaler

    from gradscale_torch import ShardedGradScaler

    for make in (sharded_grad_scaler.ShardedGradScaler, ShardedGradScaler):
        scaler = make("cpu")
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizers = [optimizer_of(torch, name, "fused", [parameter]) for parameter in parameters]
        scaler.scale(torch.ones(()))
        for parameter in parameters:
            parameter.grad = torch.full((2,), 65536.0)

        def run(scaler: Any = scaler, optimizers: list[Any] = optimizers) -> None:
            scaler.step(optimizers[0])
            scaler.unscale_(optimizers[1])
            scaler.step(optimizers[1])
            scaler.update()

        if make is ShardedGradScaler:
            run()
            assert all(parameter.ne(0).all() for parameter in parameters)
            assert not any(scaler.last_step(optimizer).skipped for optimizer in optimizers)
        else:
            # Its verdicts have different shapes.
            with pytest.raises(RuntimeError, match="output with shape"):
                run()


@pytest.mark.usefixtures("group")
def test_the_sharded_scaler_of_the_host_grows_to_infinity_at_torchs_and_stops_at_ours(torch: Any) -> None:
    from torch.distributed.fsdp import sharded_grad_scaler

    from gradscale_torch import ShardedGradScaler

    scales = []
    for make in (sharded_grad_scaler.ShardedGradScaler, ShardedGradScaler):
        scaler = make("cpu", init_scale=2.0**126, growth_interval=1)
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        for _ in range(4):
            iterate(torch, scaler, optimizer, parameter, 0.0)
        scales.append(scaler.get_scale())
    assert scales == [math.inf, 2.0**127]


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("settings", [{"dampening": 0.5}, {"nesterov": True}], ids=str)
def test_after_a_first_fused_step_that_was_skipped_the_next_one_is_the_first(
    torch: Any, ours: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], late: bool
) -> None:
    from gradscale_torch import verdicts

    if late:
        monkeypatch.setattr(verdicts, "would_wait", lambda _: True)
    seen = []
    for variant, gradients in (("fused", (math.inf, 1.0, 3.0)), ("single", (1.0, 3.0))):
        scaler, parameter = ours("cpu"), torch.nn.Parameter(torch.zeros(2))
        optimizer = optimizer_of(torch, "SGD", variant, [parameter], momentum=0.5, **settings)
        for gradient in gradients:
            iterate(torch, scaler, optimizer, parameter, gradient)
        seen.append(parameter)
    assert_same(*seen)
