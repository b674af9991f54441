"""Torch's arguments, and what scripts touch beyond its methods: ours take it, or refuse it with what to use."""

from __future__ import annotations

import collections
import functools
import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from axes_torch import gradscale_torch, torch
from small_torch import Small
from torch.amp.grad_scaler import OptState

import gradscale
from gradscale import GradscaleError, GradScaler, InvalidTypeError, InvalidValueError, ShardedGradScaler, presets

pytestmark = pytest.mark.torch

Pair = tuple[Any, Any]
WARNING = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."


@pytest.fixture
def pair(group: None, pair: Pair):  # noqa: ARG001
    """Return our class and torch's, in a world of one."""
    return pair


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
def test_enabled_takes_any_truth_value(pair: Pair, value):
    for make in pair:
        scaler = make("cpu", enabled=value)
        assert bool(scaler.is_enabled()) is bool(value)
        assert scaler.scale(torch.ones(())).item() == (65536.0 if value else 1.0)
    assert pair[0]("cpu", enabled=torch.tensor(True)).is_enabled() is True
    with pytest.raises(InvalidTypeError, match="enabled must be true or false, got tensor"):
        pair[0]("cpu", enabled=torch.ones(2))


def test_device_is_whatever_names_one_and_what_names_none_is_refused(pair: Pair):
    for device in ("cpu", torch.device("cpu"), "meta", "xla", "hpu", None, 0, 127):
        assert [make(device).is_enabled() for make in pair] == [True, True]
    for device in ("nonsense", "cdua", "cpu:", "gpu", "", "cuda:x", 1.5, 128):
        # torch takes these, too.
        assert pair[1](device).is_enabled()
        with pytest.raises(GradscaleError, match="device") as caught:
            pair[0](device)
        assert repr(device) in str(caught.value)


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
    monkeypatch: pytest.MonkeyPatch,
    pair: Pair,
    arguments: tuple[str, ...],
    options: dict[str, Any],
    expected: list[str],
):
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)
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


def test_named_tuples_and_dicts_which_torchs_refuses_are_scaled_and_text_is_refused(pair: Pair):
    ours, theirs = (make("cpu", init_scale=4.0) for make in pair)
    with pytest.raises(TypeError):
        theirs.scale(Two(torch.ones(()), torch.ones(())))
    assert ours.scale(Two(torch.ones(()), torch.ones(()))) == Two(torch.full((), 4.0), torch.full((), 4.0))
    scaled = ours.scale({1: torch.ones(()), "a": [torch.ones(())]})
    assert scaled == {1: torch.full((), 4.0), "a": [torch.full((), 4.0)]}
    with pytest.raises(InvalidValueError, match="text"):
        ours.scale("text")


# What scripts touch.


def states_of(run: Small):
    """Return what the scaler keeps of the optimizer in this iteration."""
    return run.scaler._per_optimizer_states[id(run.optimizer)]


# Overrides.

NOT_CALLED = ["_unscale_grads_", "_maybe_opt_step", "_get_scale_async", "_check_inf_per_device"]
NOT_CALLED += ["_lazy_init_scale_growth_tracker", "_check_scale_growth_tracker", "_amp_update_scale_cpu_"]
ADVICE = r"(group=|allow_fp16_grads=True|policy=)"


@pytest.mark.parametrize("name", NOT_CALLED)
def test_an_override_that_would_be_passed_by_is_refused(pair: Pair, name: str):
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
def test_step_calls_an_overridden_unscale(pair: Pair, way: str, closure: bool):
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


def test_an_override_of_unscale_that_judges_nothing_is_an_error_as_at_torchs(pair: Pair):
    for kind in pair:
        run = Small(type("Idle", (kind,), {"unscale_": lambda *_: None})("cpu"))
        run.give(1.0)
        with pytest.raises(AssertionError):
            run.step()
        assert run.held == [[0.0, 0.0]]


# The states of optimizers.


def test_a_verdict_that_is_written_before_there_is_a_scale_counts(pair: Pair):
    run = Small(pair[0]("cpu", init_scale=4.0))
    states_of(run).update(stage=OptState.UNSCALED, found_inf_per_device={torch.device("cpu"): torch.ones(1)})
    run.step()
    assert (run.held, run.scaler.get_scale()) == ([[0.0, 0.0]], 2.0)


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_flags_of_one_element_are_taken_of_two_devices_and_by_any_policy(pair: Pair, hysteresis: int):
    run = Small(pair[0]("cpu", policy=gradscale.DynamicScale(init_scale=4.0, hysteresis=hysteresis)))
    for flags in ([0.0, 1.0], [1.0, 0.0]):
        run.put(1.0)
        # The same place by two names, as there may be no other device.
        names = torch.device("cpu"), torch.device("cpu", 0)
        found = {name: torch.full((1,), flag) for name, flag in zip(names, flags, strict=True)}
        states_of(run).update(stage=OptState.UNSCALED, found_inf_per_device=found)
        run.step()
    assert (run.held, run.scaler.get_scale()) == ([[0.0, 0.0]], 4.0 / 2 ** (2 // hysteresis))


def test_what_is_no_state_of_an_optimizer_is_an_error(pair: Pair):
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
    # torch's takes no float16.
    run = Small(pair[0]("cpu"), dtypes=["float16"])
    run.scaler._enabled = False
    run.parameter.grad = torch.full_like(run.parameter, 4.0)
    # Over a group it is not known whether plain tensors are parts, as with an enabled one.
    is_grouped = pair[0].__name__ == "ShardedGradScaler"
    said = r"over a group needs DTensor.*Call unscale_\(optimizer\), and then"
    with pytest.raises(InvalidValueError, match=said) if is_grouped else nullcontext():
        assert run.scaler.unscale_(run.optimizer, max_norm=1.0).item() == pytest.approx(32**0.5)


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


def test_first_numbers_and_factors_that_cannot_be_are_refused(pair: Pair):
    scaler = pair[0]("cpu")
    before = scaler.state_dict()
    wrong = {"_init_scale": 0.0, "_init_growth_tracker": -1, "_growth_factor": 1.0, "_growth_interval": 0.5}
    for name, value in wrong.items():
        with pytest.raises(GradscaleError):
            setattr(scaler, name, value)
    assert (scaler.state_dict(), scaler._init_scale) == (before, 2.0**16)


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
