"""Torch's arguments, and what scripts touch beyond its methods: ours take it, or refuse it with what to use."""

from __future__ import annotations

import collections
import functools
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from axes_torch import ShardedGradScaler, TorchScaler, gradscale_torch, torch
from small_torch import Small
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedScaler

from gradscale import GradscaleError, GradScaler, InvalidTypeError, InvalidValueError, presets

pytestmark = pytest.mark.torch

Pair = tuple[Any, Any]
PAIRS: dict[str, Pair] = {
    "GradScaler": (gradscale_torch.GradScaler, TorchScaler),
    "ShardedGradScaler": (ShardedGradScaler, TorchShardedScaler),
}
WARNING = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."


@pytest.fixture(params=PAIRS)
def pair(group: None, request: pytest.FixtureRequest):  # noqa: ARG001
    """Return our class and torch's, in a world of one."""
    return PAIRS[request.param]


# Arguments.


def check_signature(ours, theirs, but: str = ""):
    """Check that a function takes torch's arguments, of which one may have another default, and options of its own."""
    mine, wanted = ([*inspect.signature(each).parameters.values()] for each in (ours, theirs))
    # Options of our own stand before **kwargs.
    mine.sort(key=lambda one: one.name not in {other.name for other in wanted})
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


def test_enabled_takes_any_truth_value_and_device_whatever_names_one(pair: Pair):
    for make in pair:
        for value in (None, 0, 1, "", "yes", [], [0], 0.5):
            scaler = make("cpu", enabled=value)
            assert bool(scaler.is_enabled()) is bool(value)
            assert scaler.scale(torch.ones(())).item() == (65536.0 if value else 1.0)
        for device in ("cpu", torch.device("cpu"), "meta", "xla", "hpu", None, 0, 127):
            assert make(device).is_enabled() is True
    assert pair[0]("cpu", enabled=torch.tensor(True)).is_enabled() is True
    for device in ("nonsense", "cdua", "cpu:", "gpu", "", "cuda:x", 1.5, 128):
        with pytest.raises(GradscaleError, match="device") as caught:
            pair[0](device)
        assert repr(device) in str(caught.value)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("device", [(), ("cuda",), ("cpu",), ("xpu",)], ids=str)
def test_cuda_without_cuda_warns_as_torch_does_and_is_disabled(monkeypatch, pair: Pair, device: Any, enabled: bool):
    warns = enabled and device in ((), ("cuda",))
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)
    for make in pair:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler = make(*device, enabled=enabled)
        assert [(each.category, str(each.message)) for each in caught] == [(UserWarning, WARNING)] * warns
        assert scaler.is_enabled() is (enabled and not warns)
        # The caller's line, which torch's ShardedGradScaler does not reach, nor its GradScaler in torch 2.6.
        if make is pair[0]:
            assert {Path(each.filename) for each in caught} <= {Path(__file__)}


Two = collections.namedtuple("Two", "first second")


def test_named_tuples_and_dicts_are_scaled(pair: Pair):
    scaler, one, four = pair[0]("cpu", init_scale=4.0), torch.ones(()), torch.full((), 4.0)
    assert scaler.scale(Two(one, one)) == Two(four, four)
    assert scaler.scale({1: one, "a": [one]}) == {1: four, "a": [four]}


# Overrides.

NOT_CALLED = ["_unscale_grads_", "_maybe_opt_step", "_get_scale_async", "_check_inf_per_device"]
NOT_CALLED += ["_lazy_init_scale_growth_tracker", "_check_scale_growth_tracker", "_amp_update_scale_cpu_"]
ADVICE = r"(group=|allow_fp16_grads=True|policy=)"


@pytest.mark.parametrize("name", NOT_CALLED)
def test_an_override_that_would_be_passed_by_is_refused(pair: Pair, name: str):
    ours, _ = pair
    mixed = type("Mixed", (type("Mixin", (), {name: lambda *_: None}), ours), {})
    own = type("Own", (ours,), {name: lambda *_: None})
    for kind in (mixed, own, type("Below", (own,), {})):
        with pytest.raises(InvalidTypeError, match=rf"{name} must stay as it is.*{kind.__name__}.*{ADVICE}"):
            kind("cpu")
    with pytest.raises(InvalidValueError, match=rf"{name} must stay as it is.*{ADVICE}"):
        setattr(ours("cpu"), name, lambda *_: None)
    assert type("Plain", (ours,), {"step": lambda *_: None})("cpu").step() is None


@pytest.mark.parametrize("way", ["class", "instance"])
@pytest.mark.parametrize("closure", [False, True], ids=["", "closure"])
def test_step_calls_an_overridden_unscale_which_has_to_judge(pair: Pair, way: str, closure: bool):
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
        run = Small(type("Idle", (kind,), {"unscale_": lambda *_: None})("cpu"))
        run.give(1.0)
        with pytest.raises(AssertionError):
            run.step()
        assert run.held == [[0.0, 0.0]]


# The states of optimizers, and other inner names.


def states_of(run: Small):
    """Return what the scaler keeps of the optimizer in this iteration."""
    return run.scaler._per_optimizer_states[id(run.optimizer)]


def test_a_verdict_that_is_written_before_there_is_a_scale_counts(pair: Pair):
    run = Small(pair[0]("cpu", init_scale=4.0))
    states_of(run).update(stage=OptState.UNSCALED, found_inf_per_device={torch.device("cpu"): torch.ones(1)})
    run.step()
    assert (run.held, run.scaler.get_scale()) == ([[0.0, 0.0]], 2.0)


def test_what_is_no_state_of_an_optimizer_is_an_error(pair: Pair):
    run = Small(pair[0]("cpu"))
    with pytest.raises(TypeError):
        states_of(run)["found_inf_per_device"]["cpu"] = 1.0
    run.put(1.0)
    for name, value in (("stage", "READY"), ("found", {}), ("found_inf_per_device", {"cpu": 1.0})):
        with pytest.raises(InvalidValueError, match=f"got .*{name}"):
            states_of(run)[name] = value


def test_what_an_inner_name_cannot_be_is_refused(pair: Pair):
    scaler = pair[0]("cpu")
    before = scaler.state_dict()
    wrong = {"_init_scale": 0.0, "_init_growth_tracker": -1, "_growth_factor": 1.0, "_growth_interval": 0.5}
    for name, value in (wrong | {"_per_optimizer_states": 1, "_scale": None, "_growth_tracker": None}).items():
        with pytest.raises(GradscaleError, match=name.lstrip("_")):
            setattr(scaler, name, value)
    assert (scaler.state_dict(), scaler._init_scale) == (before, 2.0**16)


def test_a_scaler_that_is_switched_off_passes_through(pair: Pair):
    def script(make):
        run = Small(make("cpu"))
        # As fairscale's ShardedGradScaler.
        run.scaler._enabled = False
        loss = torch.ones(())
        assert run.scaler.scale(loss) is loss
        run.give(1.0)
        run.step(explicit=True)
        return run.held, run.scaler.is_enabled(), run.scaler.get_scale(), run.scaler.state_dict()

    ours, theirs = map(script, pair)
    assert ours == theirs


def test_torchs_functions_are_found_when_its_names_are_replaced(pair: Pair, monkeypatch: pytest.MonkeyPatch):
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


# What looks like a group.


class Lookalike:
    """As torch's own tests have one, whose work can do nothing but wait; another rank finds an infinity."""

    def __init__(self):
        self.calls: list[Any] = []
        self.rank, self.size = (lambda: 0), (lambda: 1)

    def allreduce(self, tensors: list[Any], options):
        self.calls.append((tensors[0].dtype, options.reduceOp))
        tensors[0][0].clamp_(min=1)
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("wrap", [lambda group: group, lambda group: [group]], ids=["bare", "listed"])
def test_any_object_with_rank_size_and_allreduce_is_a_process_group(wrap: Callable[[Any], Any]):
    group = Lookalike()
    run = Small(ShardedGradScaler("cpu", init_scale=4.0, process_group=wrap(group)))
    run.put(8.0)
    assert run.step() is None
    # And the greeting that goes over a group once.
    assert group.calls == [(torch.int32, torch.distributed.ReduceOp.MAX)] * 2
    assert (run.held, run.scaler.get_scale(), run.report.skipped) == ([[0.0, 0.0]], 2.0, True)


@pytest.mark.usefixtures("group")
def test_a_lookalike_of_torchs_tests_is_a_group_and_a_backend_of_a_group_is_none():
    one = type("Dummy", (Lookalike,), {"__module__": "torch.testing._internal.common_fsdp"})()
    assert ShardedGradScaler("cpu", process_group=one).process_group is one
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    with pytest.raises(InvalidTypeError, match=r"group must be a torch\.distributed ProcessGroup"):
        ShardedGradScaler("cpu", process_group=backend)


# Slips.


def test_habits_name_what_to_write(pair: Pair):
    # The first argument of torch.cuda.amp's.
    with pytest.raises(GradscaleError, match=r"write init_scale=16384\.0"):
        pair[0](2.0**14)
    with pytest.raises(GradscaleError, match=r"such as max_norm=, got \(1\.0,\)"):
        pair[0]("cpu").unscale_(None, 1.0)
    with pytest.raises(GradscaleError, match=r"init_scale=, got \('cuda',\).*gradscale_torch\.GradScaler"):
        GradScaler("cuda")  # type: ignore[arg-type]


def test_a_misspelt_preset_names_the_nearest_one():
    with pytest.raises(AttributeError, match=r"'megatrom'; did you mean 'megatron'\?"):
        presets.megatrom  # noqa: B018
