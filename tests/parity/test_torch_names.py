"""What scripts touch of torch's scalers beyond the public methods works on ours, or is refused with what to use."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest

from gradscale import GradscaleError, GradScaler, InvalidTypeError, InvalidValueError, ShardedGradScaler, presets

pytestmark = pytest.mark.torch


@pytest.fixture
def pair(group: None, pair: tuple[Any, Any]) -> tuple[Any, Any]:  # noqa: ARG001
    """Return our class and torch's, in a world of one."""
    return pair


def model(torch: Any, gradient: float = 1.0, dtype: str = "float32") -> tuple[Any, Any]:
    """Return a parameter and its optimizer."""
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=getattr(torch, dtype)))
    parameter.grad = torch.full_like(parameter, gradient)
    return parameter, torch.optim.SGD([parameter], lr=1.0)


TRUTHS = [None, 0, 1, "", "yes", [], [0], 0.5]


@pytest.mark.parametrize("value", TRUTHS, ids=repr)
def test_enabled_takes_any_truth_value(pair: tuple[Any, Any], torch: Any, value: Any) -> None:
    for make in pair:
        scaler = make("cpu", enabled=value)
        assert bool(scaler.is_enabled()) is bool(value)
        loss = torch.ones(())
        assert scaler.scale(loss).item() == (65536.0 if value else 1.0)
    assert pair[0]("cpu", enabled=torch.tensor(True)).is_enabled() is True


def test_what_is_neither_true_nor_false_is_refused(pair: tuple[Any, Any], torch: Any) -> None:
    with pytest.raises(InvalidTypeError, match="enabled must be true or false, got tensor"):
        pair[0]("cpu", enabled=torch.ones(2))


def test_device_is_whatever_names_one(pair: tuple[Any, Any], torch: Any) -> None:
    for device in ("cpu", torch.device("cpu"), "meta", "xla", "hpu", None, 0):
        assert [make(device).is_enabled() for make in pair] == [True, True]


NOT_CALLED = ["_unscale_grads_", "_maybe_opt_step", "_get_scale_async", "_check_inf_per_device"]
ADVICE = r"(group=|allow_fp16_grads=True|policy=)"


@pytest.mark.parametrize("name", NOT_CALLED)
def test_an_override_that_would_be_passed_by_is_refused_when_constructed(pair: tuple[Any, Any], name: str) -> None:
    ours, _ = pair
    mixed = type("Mixed", (type("Mixin", (), {name: lambda *_: None}), ours), {})
    own = type("Own", (ours,), {name: lambda *_: None})
    below = type("Below", (own,), {})
    for kind in (mixed, own, below):
        with pytest.raises(InvalidTypeError, match=rf"{name} must stay as it is.*{kind.__name__}.*{ADVICE}"):
            kind("cpu")
    assert type("Plain", (ours,), {"step": lambda *_: None})("cpu").step() is None


@pytest.mark.parametrize("name", NOT_CALLED)
def test_an_override_of_an_instance_is_refused(pair: tuple[Any, Any], name: str) -> None:
    scaler = pair[0]("cpu")
    with pytest.raises(InvalidValueError, match=rf"{name} must stay as it is.*{ADVICE}"):
        setattr(scaler, name, lambda *_: None)


@pytest.mark.parametrize("way", ["class", "instance"])
@pytest.mark.parametrize("closure", [False, True], ids=["", "closure"])
def test_step_calls_an_overridden_unscale(pair: tuple[Any, Any], torch: Any, way: str, closure: bool) -> None:
    def unscale_(scaler: Any, optimizer: Any) -> None:
        kind.unscale_(scaler, optimizer)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.clamp_(max=0.5)

    for kind in pair[: 1 if closure else 2]:
        scaler = (type("Clamping", (kind,), {"unscale_": unscale_}) if way == "class" else kind)("cpu")
        if way == "instance":
            scaler.unscale_ = functools.partial(unscale_, scaler)
        parameter, optimizer = model(torch)
        scaler.scale(torch.ones(()))
        parameter.grad *= 65536.0
        scaler.step(optimizer, *[lambda: None] * closure)
        scaler.update()
        assert parameter.tolist() == [-0.5, -0.5], kind


def test_an_override_of_unscale_that_judges_nothing_is_an_error_as_at_torchs(pair: tuple[Any, Any], torch: Any) -> None:
    for kind in pair:
        scaler = type("Idle", (kind,), {"unscale_": lambda *_: None})("cpu")
        parameter, optimizer = model(torch)
        scaler.scale(torch.ones(()))
        with pytest.raises(AssertionError):
            scaler.step(optimizer)
        assert parameter.tolist() == [0.0, 0.0]


def test_the_state_of_an_optimizer_follows_what_happens_to_it(pair: tuple[Any, Any], torch: Any) -> None:
    from torch.amp.grad_scaler import OptState

    def unscale_in_closure(scaler: Any, optimizer: Any, gradient: float) -> bool:
        """Do what mosaicml's ClosureGradScaler does, but that it keeps the state from before ``unscale_``."""
        state = scaler._per_optimizer_states[id(optimizer)]
        for value in (1.0, gradient):
            state["stage"] = OptState.READY
            optimizer.param_groups[0]["params"][0].grad = torch.full((2,), value) * scaler._scale
            scaler.unscale_(optimizer)
        return sum(flag.item() for flag in state["found_inf_per_device"].values()) > 0

    for gradient in (1.0, float("inf")):
        for make in pair:
            scaler = make("cpu")
            parameter, optimizer = model(torch)
            scaler.scale(torch.ones(()))
            assert unscale_in_closure(scaler, optimizer, gradient) is (gradient != 1.0)
            before = scaler._per_optimizer_states[id(optimizer)]
            scaler.update()
            # The next iteration has states of its own.
            assert scaler.get_scale() == (65536.0 if gradient == 1.0 else 32768.0)
            assert before["stage"] is OptState.UNSCALED
            assert parameter.grad.tolist() == [gradient] * 2
            assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


def test_what_is_written_to_the_state_of_an_optimizer_is_its_verdict(pair: tuple[Any, Any], torch: Any) -> None:
    from torch.amp.grad_scaler import OptState

    for make in pair:
        for found, moved in ((0.0, -1.0), (1.0, 0.0)):
            scaler = make("cpu")
            parameter, optimizer = model(torch)
            scaler.scale(torch.ones(()))
            assert scaler._found_inf_per_device(optimizer) == {}
            flags = {torch.device("cpu"): torch.tensor(found)}
            scaler._per_optimizer_states[id(optimizer)] = {"stage": OptState.UNSCALED, "found_inf_per_device": flags}
            scaler.step(optimizer)
            scaler.update()
            assert parameter.tolist() == [moved] * 2
            assert scaler.get_scale() == (32768.0 if found else 65536.0)


def test_a_write_that_would_be_lost_is_an_error(pair: tuple[Any, Any], torch: Any) -> None:
    from torch.amp.grad_scaler import OptState

    scaler = pair[0]("cpu")
    _, optimizer = model(torch)
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"] = OptState.READY
    for name, value in (("stage", OptState.STEPPED), ("found_inf_per_device", {"cpu": 1.0})):
        with pytest.raises(InvalidValueError, match=f"{name} can be set .* unscale_"):
            state[name] = value
    with pytest.raises(TypeError):
        state["found_inf_per_device"]["cpu"] = 1.0
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    for name, value in (("stage", "READY"), ("found", {})):
        with pytest.raises(InvalidValueError, match=f"got .*{name}"):
            state[name] = value


def test_unscale_grads_is_torchs_function(pair: tuple[Any, Any], torch: Any) -> None:
    for dtype in ("float32", "float16"):
        results = []
        for make in pair:
            parameter, optimizer = model(torch, float("inf"), dtype)
            scaler = make("cpu")
            scaler.scale(torch.ones(()))
            # The fourth argument has a default in ShardedGradScaler alone.
            more = (True,) if make.__name__ == "GradScaler" else ()
            found = scaler._unscale_grads_(optimizer, torch.ones(()), torch.zeros(()), *more)
            results.append(([flag.item() for flag in found.values()], parameter.grad.tolist()))
        assert results[0] == results[1] == ([1.0], [float("inf")] * 2)
    assert pair[0]("cpu")._unscale_grads_(model(torch)[1], torch.ones(()), torch.zeros(()), True)


def test_maybe_opt_step_is_torchs_function(pair: tuple[Any, Any], torch: Any) -> None:
    for found, moved in ((0.0, -1.0), (1.0, 0.0)):
        seen = []
        for make in pair:
            parameter, optimizer = model(torch)
            make("cpu")._maybe_opt_step(optimizer, {"found_inf_per_device": {"cpu": torch.tensor(found)}})
            seen.append(parameter.tolist())
        assert seen == [[moved] * 2] * 2


def test_the_first_numbers_and_the_factors_can_be_set(pair: tuple[Any, Any], torch: Any) -> None:
    seen = []
    for make in pair:
        scaler = make("cpu")
        scaler._init_scale, scaler._init_growth_tracker = 8.0, 1
        scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval = 4.0, 0.25, 2
        before = scaler.state_dict()
        scales = []
        for gradient in (1.0, float("nan"), 1.0):
            scaler.scale(torch.ones(()))
            scaler.step(model(torch, gradient)[1])
            scaler.update()
            scales.append(scaler.get_scale())
        # Too late: there is a scale.
        scaler._init_scale, scaler._init_growth_tracker = 2.0, 0
        scales.append(scaler.get_scale())
        seen.append((before, scales, scaler.state_dict()))
    assert seen[0] == seen[1]
    assert seen[0][1] == [32.0, 8.0, 8.0, 8.0]


def test_a_first_growth_tracker_beyond_the_interval_is_taken(pair: tuple[Any, Any], torch: Any) -> None:
    seen = []
    for make in pair:
        scaler = make("cpu", growth_interval=1)
        scaler._init_growth_tracker = 7
        scaler.scale(torch.ones(()))
        begun = scaler.state_dict()
        scaler.load_state_dict(make("cpu", init_scale=4.0, growth_interval=2).state_dict())
        seen.append((begun, scaler.state_dict()))
    assert seen[0] == seen[1]
    assert [state["_growth_tracker"] for state in seen[0]] == [7, 0]


def test_torchs_functions_are_found_when_its_names_are_replaced(
    pair: tuple[Any, Any], torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = pair
    for place in (torch, torch.amp, torch.amp.grad_scaler):
        monkeypatch.setattr(place, "GradScaler", ours)
    parameter, optimizer = model(torch, 8.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert isinstance(scaler, torch.GradScaler)
    found = scaler._unscale_grads_(optimizer, torch.tensor(0.5), torch.zeros(()), True)
    assert [flag.item() for flag in found.values()] == [0.0]
    scaler._maybe_opt_step(optimizer, {"found_inf_per_device": found})
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [-5.0, -5.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("_init_scale", 0.0), ("_init_growth_tracker", -1), ("_growth_factor", 1.0), ("_growth_interval", 0.5)],
)
def test_a_wrong_number_is_refused_and_nothing_is_changed(pair: tuple[Any, Any], name: str, value: Any) -> None:
    scaler = pair[0]("cpu")
    before = scaler.state_dict()
    with pytest.raises(GradscaleError):
        setattr(scaler, name, value)
    assert scaler.state_dict() == before


def test_optimizer_states_set_anew_begin_the_iteration_anew(pair: tuple[Any, Any], torch: Any) -> None:
    from torch.amp.grad_scaler import _refresh_per_optimizer_state

    seen = []
    for make in pair:
        scaler = make("cpu", init_scale=4.0)
        parameter, optimizer = model(torch, 16.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler._per_optimizer_states = collections.defaultdict(_refresh_per_optimizer_state)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append((parameter.tolist(), scaler.state_dict()))
    assert seen[0] == seen[1]
    assert seen[0][0] == [-1.0, -1.0]


def test_optimizer_states_that_were_read_can_be_set_again_and_others_cannot(torch: Any, pair: tuple[Any, Any]) -> None:
    scaler = pair[0]("cpu")
    _, optimizer = model(torch)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states = scaler._per_optimizer_states
    assert len(scaler._per_optimizer_states) == 1
    with pytest.raises(InvalidValueError, match="_per_optimizer_states can be set to an empty mapping"):
        scaler._per_optimizer_states = {id(optimizer): {}}


def scaled(torch: Any, scaler: Any) -> Any:
    """Return an optimizer with a gradient, in an iteration in which a loss was scaled."""
    scaler.scale(torch.ones(()))
    return model(torch)[1]


def unscale_an_expanded_gradient(torch: Any, scaler: Any) -> None:
    optimizer = scaled(torch, scaler)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(()).expand(2)
    scaler.unscale_(optimizer)


MISTAKES: dict[str, Callable[[Any, Any], Any]] = {
    "update-first": lambda torch, scaler: scaler.update(),  # noqa: ARG005
    "unscale-first": lambda torch, scaler: scaler.unscale_(model(torch)[1]),
    "unscale-twice": lambda torch, scaler: [scaler.unscale_(one) for one in [scaled(torch, scaler)] * 2],
    "step-twice": lambda torch, scaler: [scaler.step(one) for one in [scaled(torch, scaler)] * 2],
    "update-without-step": lambda torch, scaler: (scaled(torch, scaler), scaler.update()),
    "copy-in-the-middle": lambda torch, scaler: (scaler.unscale_(scaled(torch, scaler)), copy.copy(scaler)),
    "empty-state-dict": lambda torch, scaler: scaler.load_state_dict({}),  # noqa: ARG005
    "shared-memory": unscale_an_expanded_gradient,
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_caught_as_torchs_error_is(torch: Any, mistake: Callable[[Any, Any], Any]) -> None:
    import gradscale_torch

    with pytest.raises((AssertionError, RuntimeError)) as caught:
        mistake(torch, torch.amp.GradScaler("cpu"))
    with pytest.raises(caught.type) as ours:
        mistake(torch, gradscale_torch.GradScaler("cpu"))
    assert isinstance(ours.value, GradscaleError)


@pytest.mark.parametrize("when", ["before-unscale", "after-update"])
def test_a_scale_that_is_put_in_the_place_of_the_present_one_is_used(
    pair: tuple[Any, Any], torch: Any, when: str
) -> None:
    from torch.amp.grad_scaler import _refresh_per_optimizer_state

    seen = []
    for make in pair:
        scaler = make("cpu", init_scale=4.0)
        parameter, optimizer = model(torch, 16.0)
        scaler.scale(torch.ones(()))
        if when == "after-update":
            # What a host does that updates by itself.
            scaler.step(optimizer)
            scaler._per_optimizer_states = collections.defaultdict(_refresh_per_optimizer_state)
        scaler._scale = torch.tensor(2.0)
        if when == "after-update":
            assert scaler.scale(torch.ones(())).item() == 2.0
        scaler.step(optimizer)
        seen.append(parameter.tolist())
    assert seen[0] == seen[1]


def test_repr_shows_the_scale(pair: tuple[Any, Any], torch: Any) -> None:
    scaler = pair[0]("cpu")
    assert "), scale=65536.0, " in repr(scaler)
    scaler.scale(torch.ones(()))
    scaler.step(model(torch, float("inf"))[1])
    scaler.update()
    assert "), scale=32768.0, " in repr(scaler)


class Work:
    """What an all-reduce returns: nothing but ``wait``."""

    def wait(self) -> None:
        return None


class LooksLikeAGroup:
    """As torch's own tests have one: two other ranks that find nothing, or an infinity."""

    def __init__(self, other: Any = None) -> None:
        self.calls: list[Any] = []
        self.other = other

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: list[Any], options: Any) -> Work:
        self.calls.append((tensors[0].dtype, options.reduceOp))
        if self.other is not None:
            tensors[0].copy_(self.other(tensors[0]))
        return Work()


def test_any_object_with_rank_size_and_allreduce_is_a_process_group(torch: Any) -> None:
    from gradscale_torch import ShardedGradScaler

    for wrap in (lambda group: group, lambda group: [group]):
        one = LooksLikeAGroup()
        scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=wrap(one))
        parameter, optimizer = model(torch, 8.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert parameter.tolist() == [-2.0, -2.0]
        # And the greeting that goes over a group once.
        assert [call[0] for call in one.calls] == [torch.int32] * 2


@pytest.mark.usefixtures("group")
def test_a_lookalike_of_torchs_tests_is_a_group_and_a_backend_of_a_group_is_none(torch: Any) -> None:
    from gradscale_torch import ShardedGradScaler

    kind = type("Dummy", (LooksLikeAGroup,), {"__module__": "torch.testing._internal.common_fsdp"})
    one = kind()
    assert ShardedGradScaler("cpu", process_group=one).process_group is one
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    with pytest.raises(InvalidTypeError, match=r"group must be a torch\.distributed ProcessGroup"):
        ShardedGradScaler("cpu", process_group=backend)


def test_what_a_lookalike_of_a_group_finds_counts(torch: Any) -> None:
    from gradscale_torch import ShardedGradScaler

    def infinite(values: Any) -> Any:
        worse = values.clone()
        worse[0] = max(1, worse[0])
        return worse

    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=LooksLikeAGroup(infinite))
    parameter, optimizer = model(torch, 8.0)
    scaler.scale(torch.ones(()))
    assert scaler.step(optimizer) is None
    scaler.update()
    assert (parameter.tolist(), scaler.get_scale()) == ([0.0, 0.0], 2.0)
    assert scaler.last_step(optimizer).skipped


def test_groups_work_where_torchs_options_have_no_asyncop(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradscale_torch import ShardedGradScaler

    # As in torch 2.6, whose options take no other attributes.
    options = type("AllreduceOptions", (), {"__slots__": ("reduceOp", "timeout")})
    monkeypatch.setattr(torch.distributed, "AllreduceOptions", options)
    one = LooksLikeAGroup()
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=one)
    parameter, optimizer = model(torch, 8.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [-2.0, -2.0]
    assert [call[1] for call in one.calls] == [torch.distributed.ReduceOp.MAX] * 2


def test_torchs_arguments_given_to_gradscales_own_scaler_name_the_right_one() -> None:
    with pytest.raises(InvalidTypeError, match=r"init_scale=, got \('cuda',\).*gradscale_torch\.GradScaler"):
        GradScaler("cuda")  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match=r"group=, got \('cuda',\).*gradscale_torch\.ShardedGradScaler"):
        ShardedGradScaler("cuda", group=None)  # type: ignore[arg-type]
    for given in ({"device": "cuda"}, {"process_group": None}, {"allow_fp16_grads": True}):
        with pytest.raises(InvalidTypeError, match=r"unexpected keyword arguments.*gradscale_torch\.GradScaler"):
            GradScaler(**given)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError) as caught:
        GradScaler(devise="cuda")  # type: ignore[call-arg]
    assert "gradscale_torch" not in str(caught.value)


@pytest.mark.parametrize("name", ["GradScaler", "ShardedGradScaler"])
def test_habits_and_slips_at_torchs_replacements_name_what_to_write(name: str) -> None:
    make = getattr(pytest.importorskip("gradscale_torch"), name)
    for scale in (2.0**14, 16384):
        # The first argument of torch.cuda.amp's.
        with pytest.raises(InvalidTypeError, match=f"write init_scale={scale}"):
            make(scale)
    with pytest.raises(InvalidTypeError, match="did you mean 'growth_interval'"):
        make("cpu", growth_intervall=100)
    with pytest.raises(InvalidTypeError, match=r"such as max_norm=, got \(1\.0,\)"):
        make("cpu").unscale_(None, 1.0)


def test_a_misspelt_preset_names_the_nearest_one() -> None:
    with pytest.raises(AttributeError, match=r"'megatrom'; did you mean 'megatron'\?"):
        presets.megatrom  # noqa: B018
    assert not hasattr(presets, "__wrapped__")
