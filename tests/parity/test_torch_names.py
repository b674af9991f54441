"""What scripts touch of torch's scalers beyond the public methods works on ours, or is refused with what to use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from axes_torch import gradscale_torch, torch
from small_torch import Small
from torch.amp.grad_scaler import OptState

import gradscale
from gradscale import GradscaleError, GradScaler, InvalidTypeError, InvalidValueError, ShardedGradScaler, presets

pytestmark = pytest.mark.torch


@pytest.fixture
def pair(group: None, pair: tuple[Any, Any]):  # noqa: ARG001
    """Return our class and torch's, in a world of one."""
    return pair


def same(pair: tuple[Any, Any], script: Callable[[Any], Any]):
    """Return what a script, which is given a class, tells of ours: the same as of torch's."""
    ours, theirs = map(script, pair)
    assert ours == theirs
    return ours


def states_of(run: Small):
    """Return what the scaler keeps of the optimizer in this iteration."""
    return run.scaler._per_optimizer_states[id(run.optimizer)]


# Overrides.

NOT_CALLED = ["_unscale_grads_", "_maybe_opt_step", "_get_scale_async", "_check_inf_per_device"]
NOT_CALLED += ["_lazy_init_scale_growth_tracker", "_check_scale_growth_tracker", "_amp_update_scale_cpu_"]
ADVICE = r"(group=|allow_fp16_grads=True|policy=)"


@pytest.mark.parametrize("name", NOT_CALLED)
def test_an_override_that_would_be_passed_by_is_refused(pair: tuple[Any, Any], name: str):
    ours, _ = pair
    mixed = type("Mixed", (type("Mixin", (), {name: lambda *_: None}), ours), {})
    own = type("Own", (ours,), {name: lambda *_: None})
    below = type("Below", (own,), {})
    for kind in (mixed, own, below):
        with pytest.raises(InvalidTypeError, match=rf"{name} must stay as it is.*{kind.__name__}.*{ADVICE}"):
            kind("cpu")
    with pytest.raises(InvalidValueError, match=rf"{name} must stay as it is.*{ADVICE}"):
        setattr(ours("cpu"), name, lambda *_: None)
    assert type("Plain", (ours,), {"step": lambda *_: None})("cpu").step() is None


@pytest.mark.parametrize("way", ["class", "instance"])
@pytest.mark.parametrize("closure", [False, True], ids=["", "closure"])
def test_step_calls_an_overridden_unscale(pair: tuple[Any, Any], way: str, closure: bool):
    def unscale_(scaler, optimizer):
        kind.unscale_(scaler, optimizer)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.clamp_(max=0.5)

    for kind in pair[: 1 if closure else 2]:
        scaler = (type("Clamping", (kind,), {"unscale_": unscale_}) if way == "class" else kind)("cpu")
        if way == "instance":
            scaler.unscale_ = functools.partial(unscale_, scaler)
        run = Small(scaler)
        run.give(1.0)
        scaler.step(run.optimizer, *[functools.partial(scaler.scale, torch.ones(()))] * closure)
        assert run.held == [[-0.5, -0.5]], kind


def test_an_override_of_unscale_that_judges_nothing_is_an_error_as_at_torchs(pair: tuple[Any, Any]):
    for kind in pair:
        run = Small(type("Idle", (kind,), {"unscale_": lambda *_: None})("cpu"))
        run.give(1.0)
        with pytest.raises(AssertionError):
            run.step()
        assert run.held == [[0.0, 0.0]]


# The states of optimizers.


def test_a_verdict_that_is_written_before_there_is_a_scale_counts(pair: tuple[Any, Any]):
    run = Small(pair[0]("cpu", init_scale=4.0))
    states_of(run).update(stage=OptState.UNSCALED, found_inf_per_device={torch.device("cpu"): torch.ones(1)})
    run.step()
    assert (run.held, run.scaler.get_scale()) == ([[0.0, 0.0]], 2.0)


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_flags_of_one_element_are_taken_of_two_devices_and_by_any_policy(pair: tuple[Any, Any], hysteresis: int):
    run = Small(pair[0]("cpu", policy=gradscale.DynamicScale(init_scale=4.0, hysteresis=hysteresis)))
    for flags in ([0.0, 1.0], [1.0, 0.0]):
        run.put(1.0)
        # The same place by two names, as there may be no other device.
        names = torch.device("cpu"), torch.device("cpu", 0)
        found = {name: torch.full((1,), flag) for name, flag in zip(names, flags, strict=True)}
        states_of(run).update(stage=OptState.UNSCALED, found_inf_per_device=found)
        run.step()
    assert (run.held, run.scaler.get_scale()) == ([[0.0, 0.0]], 4.0 / 2 ** (2 // hysteresis))


def test_what_is_no_state_of_an_optimizer_is_an_error(pair: tuple[Any, Any]):
    states = pair[0]("cpu")._per_optimizer_states
    for take in (states.__delitem__, states.pop):
        with pytest.raises(KeyError):
            take(1)
    # torch's would keep what is no state.
    assert states.setdefault(1, 5)["stage"] is OptState.READY
    run = Small(pair[0]("cpu"))
    with pytest.raises(TypeError):
        states_of(run)["found_inf_per_device"]["cpu"] = 1.0
    run.put(1.0)
    for name, value in (("stage", "READY"), ("found", {}), ("found_inf_per_device", {"cpu": 1.0})):
        with pytest.raises(InvalidValueError, match=f"got .*{name}"):
            states_of(run)[name] = value
    with pytest.raises(InvalidTypeError, match="_per_optimizer_states must be a mapping"):
        run.scaler._per_optimizer_states = 1


# Messages, functions and numbers.


def test_a_scaler_that_is_switched_off_passes_through(pair: tuple[Any, Any]):
    def script(make):
        run = Small(make("cpu"))
        # As fairscale's ShardedGradScaler.
        run.scaler._enabled = False
        loss = torch.ones(())
        assert run.scaler.scale(loss) is loss
        run.give(1.0)
        run.step(explicit=True)
        return run.held, run.scaler.is_enabled(), run.scaler.get_scale(), run.scaler.state_dict()

    same(pair, script)
    # torch's takes no float16.
    run = Small(pair[0]("cpu"), dtypes=["float16"])
    run.scaler._enabled = False
    run.parameter.grad = torch.full_like(run.parameter, 4.0)
    assert run.scaler.unscale_(run.optimizer, max_norm=1.0).item() == pytest.approx(32**0.5)


def test_torchs_functions_are_found_when_its_names_are_replaced(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch):
    for place in (torch, torch.amp, torch.amp.grad_scaler):
        monkeypatch.setattr(place, "GradScaler", pair[0])
    run = Small(torch.amp.GradScaler("cpu", init_scale=4.0))
    assert isinstance(run.scaler, torch.GradScaler)
    run.put(8.0)
    found = run.scaler._unscale_grads_(run.optimizer, torch.tensor(0.5), torch.zeros(()), True)
    assert [flag.item() for flag in found.values()] == [0.0]
    run.scaler._maybe_opt_step(run.optimizer, {"found_inf_per_device": found})
    run.step()
    assert run.held == [[-5.0, -5.0]]


def test_first_numbers_and_factors_that_cannot_be_are_refused(pair: tuple[Any, Any]):
    scaler = pair[0]("cpu")
    before = scaler.state_dict()
    wrong = {"_init_scale": 0.0, "_init_growth_tracker": -1, "_growth_factor": 1.0, "_growth_interval": 0.5}
    for name, value in wrong.items():
        with pytest.raises(GradscaleError):
            setattr(scaler, name, value)
    assert scaler.state_dict() == before


# What looks like a group.


class Lookalike:
    """As torch's own tests have one, whose work can do nothing but wait; other ranks may find an infinity."""

    def __init__(self, finds: bool = False):
        self.calls: list[Any] = []
        self._finds = finds

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: list[Any], options):
        self.calls.append((tensors[0].dtype, options.reduceOp))
        tensors[0][0].clamp_(min=int(self._finds))
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("wrap", [lambda group: group, lambda group: [group]], ids=["bare", "listed"])
@pytest.mark.parametrize("finds", [False, True])
@pytest.mark.parametrize("is_old", [False, True], ids=["", "torch-2.6"])
def test_any_object_with_rank_size_and_allreduce_is_a_process_group(
    monkeypatch: pytest.MonkeyPatch, is_old: bool, finds: bool, wrap: Callable[[Any], Any]
):
    if is_old:
        # Its options take no other attributes.
        options = type("AllreduceOptions", (), {"__slots__": ("reduceOp", "timeout")})
        monkeypatch.setattr(torch.distributed, "AllreduceOptions", options)
    group = Lookalike(finds)
    run = Small(gradscale_torch.ShardedGradScaler("cpu", init_scale=4.0, process_group=wrap(group)))
    run.put(8.0)
    assert run.step() is None
    # And the greeting that goes over a group once.
    assert group.calls == [(torch.int32, torch.distributed.ReduceOp.MAX)] * 2
    expected = ([[0.0, 0.0]], 2.0, True) if finds else ([[-2.0, -2.0]], 4.0, False)
    assert (run.held, run.scaler.get_scale(), run.report.skipped) == expected


@pytest.mark.usefixtures("group")
def test_a_lookalike_of_torchs_tests_is_a_group_and_a_backend_of_a_group_is_none():
    kind = type("Dummy", (Lookalike,), {"__module__": "torch.testing._internal.common_fsdp"})
    one = kind()
    assert gradscale_torch.ShardedGradScaler("cpu", process_group=one).process_group is one
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    with pytest.raises(InvalidTypeError, match=r"group must be a torch\.distributed ProcessGroup"):
        gradscale_torch.ShardedGradScaler("cpu", process_group=backend)


def test_torchs_arguments_given_to_gradscales_own_scaler_name_the_right_one():
    with pytest.raises(InvalidTypeError, match=r"init_scale=, got \('cuda',\).*gradscale_torch\.GradScaler"):
        GradScaler("cuda")  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match=r"group=, got \('cuda',\).*gradscale_torch\.ShardedGradScaler"):
        ShardedGradScaler("cuda", group=None)  # type: ignore[arg-type]
    for name in ("device", "process_group", "allow_fp16_grads", "devise"):
        with pytest.raises(InvalidTypeError, match="unexpected keyword arguments") as caught:
            GradScaler(**{name: None})  # type: ignore[arg-type]
        assert ("gradscale_torch.GradScaler" in str(caught.value)) is (name != "devise")


@pytest.mark.parametrize("name", ["GradScaler", "ShardedGradScaler"])
def test_habits_and_slips_at_torchs_replacements_name_what_to_write(name: str):
    make = getattr(gradscale_torch, name)
    for call, match in (
        # The first argument of torch.cuda.amp's.
        (lambda: make(2.0**14), r"write init_scale=16384\.0"),
        (lambda: make(16384), "write init_scale=16384"),
        (lambda: make("cpu", growth_intervall=100), "did you mean 'growth_interval'"),
        (lambda: make("cpu").unscale_(None, 1.0), r"such as max_norm=, got \(1\.0,\)"),
    ):
        with pytest.raises(InvalidTypeError, match=match):
            call()


def test_a_misspelt_preset_names_the_nearest_one():
    with pytest.raises(AttributeError, match=r"'megatrom'; did you mean 'megatron'\?"):
        presets.megatrom  # noqa: B018
    assert not hasattr(presets, "__wrapped__")
