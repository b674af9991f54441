"""hold=: after a skipped step a model's buffers are, to the bit, those of a run without the bad batch."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
from axes_torch import GradScaler, StepGuard, torch
from small_torch import assert_same

import gradscale
from gradscale import InvalidTypeError

pytestmark = pytest.mark.torch

nn = torch.nn
BAD = (6, 8)
RULE = gradscale.SkipSpikes(window=8, min_values=3, of="loss")
OPTIMIZERS = {
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


def normed(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a model with the buffers of BatchNorm, and a constant that no checkpoint has."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    model.register_buffer("constant", torch.ones(3), persistent=False)
    return model.to(dtype)


def batches(number: int) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(16, 6, generator=generator) for _ in range(number)]


def trained(kind: str, bad: float | None, *, micro: int = 1, compiled: bool = False, dtype=torch.float32):
    """Train through bad batches, or without them if there are none; the model's whole state."""
    model = normed(dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    guard = StepGuard(skip=RULE, hold=model)
    forward = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    for index in range(12):
        is_bad = index in BAD
        if is_bad and bad is None:
            continue
        total = 0.0
        for part, x in enumerate(batches(12 * micro)[index * micro : (index + 1) * micro]):
            factor = bad if is_bad and part == 0 else 1.0
            loss = forward((x * factor).to(dtype)).float().square().mean() / micro
            # BatchNorm hides how large a batch is.
            loss = loss * (1e3 if factor != 1.0 else 1.0)
            loss.backward()
            total = total + loss.detach()
        guard.step(optimizer, loss=total)
        assert guard.last_step(optimizer).skipped == is_bad
        optimizer.zero_grad()
    return model.state_dict()


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("micro", [1, 3], ids=["alone", "accumulated"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e4], ids=["nan", "inf", "spike"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_bad_batch_leaves_no_trace_in_the_weights_and_the_buffers(kind: str, bad: float, micro: int, dtype):
    assert equal(trained(kind, bad, micro=micro, dtype=dtype), trained(kind, None, micro=micro, dtype=dtype))


def test_the_buffers_of_a_compiled_model_are_held():
    assert equal(trained("plain", math.nan, compiled=True), trained("plain", None))


@pytest.mark.parametrize("bad", [math.nan, 1e4], ids=["nan", "spike"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_average_of_the_weights_and_a_schedule_beside_hold_are_those_of_a_run_without_the_bad_batch(
    kind, bad: float
):
    ended = []
    for skipped in ((), BAD):
        model = normed()
        optimizer, guard = OPTIMIZERS[kind](model.parameters()), StepGuard(skip=RULE, max_norm=50.0, hold=model)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        for index, x in enumerate(batches(12)):
            if index in skipped:
                continue
            factor = bad if index in BAD else 1.0
            loss = model(x * factor).square().mean() * (1e3 if index in BAD else 1.0)
            loss.backward()
            guard.step(optimizer, loss=loss, batch=index)
            guard.step_schedule(optimizer, schedule)
            if not guard.last_step(optimizer).skipped:
                average.update_parameters(model)
            optimizer.zero_grad()
        assert guard.counts()["taken"] == 10
        rates = torch.tensor([schedule.last_epoch, *schedule.get_last_lr()])
        ended.append(model.state_dict() | average.state_dict(prefix="average.") | {"rates": rates})
    assert equal(*ended)


@pytest.mark.parametrize("is_loaded_first", [True, False], ids=["model, guard", "guard, model"])
@pytest.mark.parametrize("last", BAD)
def test_a_run_that_was_saved_right_after_a_bad_step_goes_on_as_if_it_was_not(last: int, is_loaded_first: bool):
    def begun() -> list[Any]:
        model = normed()
        return [model, torch.optim.AdamW(model.parameters()), StepGuard(skip=RULE, hold=model)]

    def train(model, optimizer, guard, indices) -> list[Any]:
        for index in indices:
            loss = model(batches(12)[index]).square().mean() * (math.nan if index in BAD else 1.0)
            loss.backward()
            guard.step(optimizer, loss=loss)
            assert guard.last_step(optimizer).skipped == (index in BAD)
            optimizer.zero_grad()
        return [one.state_dict() for one in (model, optimizer, guard)]

    # The first step after it is bad, too.
    order = [0, 1, 2, 3, 4, 5, *BAD, 7, 9]
    file, at = io.BytesIO(), order.index(last) + 1
    torch.save(train(*begun(), order[:at]), file)
    file.seek(0)
    resumed, saved = begun(), torch.load(file)
    for one, state in [*zip(resumed, saved, strict=True)][:: 1 if is_loaded_first else -1]:
        one.load_state_dict(state)
    assert_same(train(*resumed, order[at:]), train(*begun(), order))


def stepped(guard: GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module, x: Any) -> bool:
    """Step, and tell whether the step was skipped."""
    guard.scale(model(x).square().mean()).backward()
    guard.step(optimizer)
    guard.update()
    optimizer.zero_grad()
    return guard.last_step(optimizer).skipped


def held() -> tuple[nn.Sequential, torch.optim.Optimizer, GradScaler, Any]:
    """Return a model after a step, its optimizer and its guard, and a bad batch."""
    model = normed()
    optimizer, guard = torch.optim.SGD(model.parameters(), lr=0.1), StepGuard(hold=model)
    good, bad = batches(1)[0], batches(1)[0] * math.nan
    assert not stepped(guard, optimizer, model, good)
    return model, optimizer, guard, bad


@pytest.mark.parametrize("assign", [False, True])
def test_what_a_model_or_a_part_of_it_loads_is_held(assign: bool):
    model, _, guard, bad = held()
    saved = copy.deepcopy(model.state_dict())
    stepped(guard, torch.optim.SGD(model.parameters(), lr=0.1), model, batches(2)[1])
    model.load_state_dict(copy.deepcopy(saved), assign=assign)
    assert stepped(guard, torch.optim.SGD(model.parameters(), lr=0.1), model, bad)
    assert equal(model.state_dict(), saved)
    model[1].load_state_dict({name: value * 0 + 3 for name, value in model[1].state_dict().items()}, assign=assign)
    before = copy.deepcopy(model.state_dict())
    assert stepped(guard, torch.optim.SGD(model.parameters(), lr=0.1), model, bad)
    assert equal(model.state_dict(), before)


def test_what_is_converted_to_another_dtype_is_held():
    model, _, guard, bad = held()
    model.double()
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        assert stepped(guard, torch.optim.SGD(model.parameters(), lr=0.1), model, bad.double())
        assert equal(model.state_dict(), before)


def test_copies_and_pickles_of_a_model_and_of_its_guard_hold_nothing():
    model, optimizer, guard, bad = held()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.load_state_dict({name: value * 0 for name, value in model.state_dict().items()})
        assert stepped(StepGuard(hold=other), torch.optim.SGD(other.parameters()), other, bad)
        assert not other[1].running_mean.any()
    before = copy.deepcopy(model.state_dict())
    assert stepped(guard, optimizer, model, bad)
    assert equal(model.state_dict(), before)
    for copied in (copy.deepcopy(guard), pickle.loads(pickle.dumps(guard))):
        assert stepped(copied, optimizer, model, bad)
        assert model[1].running_mean.isnan().all()


@pytest.mark.parametrize("calls_update", [True, False], ids=["scaler", "guard"])
def test_of_two_optimizers_each_has_to_step(calls_update: bool):
    model = normed()
    scaler = GradScaler("cpu", init_scale=4.0, hold=model) if calls_update else StepGuard(hold=model)
    parts = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[3])]
    for bad in (False, True, False, True):
        before = copy.deepcopy(model[1].state_dict())
        scaler.scale(model(batches(1)[0]).square().mean()).backward()
        if bad:
            model[0].weight.grad[0] = math.nan
        for optimizer in parts:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        # Each step of a guard ends its iteration: what the first skips is put back, and the second is made.
        assert [scaler.last_step(one).skipped for one in parts] == [bad, False]
        assert equal(model[1].state_dict(), before) == bad


def test_a_step_by_a_closure_is_held():
    model = normed()
    optimizer, guard = torch.optim.LBFGS(model.parameters(), max_iter=3), StepGuard(hold=model)

    def evaluation(x: Any):
        def closure():
            optimizer.zero_grad()
            loss = guard.scale(model(x).square().mean())
            loss.backward()
            return loss

        return closure

    guard.step(optimizer, evaluation(batches(1)[0]))
    before = copy.deepcopy(model.state_dict())
    assert before["1.num_batches_tracked"] > 0
    guard.step(optimizer, evaluation(batches(1)[0] * math.nan))
    assert guard.last_step(optimizer).skipped
    assert equal(model.state_dict(), before)


def test_an_iteration_that_is_refused_is_put_back():
    model, optimizer, guard, _ = held()
    before = copy.deepcopy(model.state_dict())
    model(batches(1)[0]).square().mean().backward()
    guard.refuse(optimizer)
    guard.step(optimizer)
    assert equal(model.state_dict(), before)
    # One in which nothing was to be stepped is left alone.
    guard.scale(model(batches(1)[0]))
    guard.update(1.0)
    assert not equal(model.state_dict(), before)


def test_tensors_are_held_and_a_buffer_that_two_modules_share_is_one():
    one, other, average = nn.BatchNorm1d(6), nn.BatchNorm1d(6), torch.zeros(6)
    other.running_mean = one.running_mean
    weight = nn.Parameter(torch.ones(1))
    optimizer, guard = torch.optim.SGD([weight]), StepGuard(hold=[one, other, average])
    for value, expected in ((1.0, 1.0), (math.nan, 1.0), (2.0, 2.0)):
        average.fill_(value)
        one.running_mean.fill_(value)
        weight.grad = torch.tensor([value])
        guard.step(optimizer)
        assert average.tolist() == one.running_mean.tolist() == [expected] * 6


@pytest.mark.parametrize(
    ("hold", "said"),
    [
        ("model", "got 'model'"),
        ([nn.Linear(1, 1), 3.0], "got 3.0"),
        (nn.BatchNorm1d(3, device="meta"), "has no values to write"),
        (nn.LazyBatchNorm1d(), "has no values to write"),
        (torch.ones(3).to_sparse(), "has no values to write, or shares them"),
        (torch.ones(3).expand(2, 3), "has no values to write, or shares them"),
    ],
    ids=["a string", "a number in a list", "meta", "lazy", "sparse", "expanded"],
)
def test_what_cannot_be_held_is_an_error(hold: object, said: str):
    with pytest.raises(InvalidTypeError, match=r"hold must be a module of torch, an array that.*" + said):
        StepGuard(hold=hold)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_module_cannot_be_held():
    with pytest.raises(InvalidTypeError, match=r"hold must be a module of torch.* with a ScriptModule"):
        StepGuard(hold=nn.Sequential(torch.jit.script(nn.BatchNorm1d(3))))


def test_a_model_without_buffers_is_no_error():
    model = nn.Linear(2, 1)
    guard, optimizer = StepGuard(hold=model), torch.optim.SGD(model.parameters())
    assert not stepped(guard, optimizer, model, torch.ones(1, 2))


class Seen(nn.Module):
    """A module whose forward pass puts other tensors in the place of its buffers: the batch, and one that grows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(1))
        self.register_buffer("all", torch.zeros(0))
        self.register_buffer("first", None)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Any) -> Any:
        self.last, self.all = x, torch.cat([self.all, x])
        self.first = x.clone() if self.first is None else None
        return self.weight * x


def test_buffers_that_the_forward_pass_replaces_are_put_back_and_the_batch_is_not_written_to():
    model = Seen()
    optimizer, guard = torch.optim.SGD(model.parameters()), StepGuard(hold=model)
    data = [torch.full((1,), value) for value in (1.0, math.inf, 2.0, math.nan)]
    for x, last, number in zip(data, (1.0, 1.0, 2.0, 2.0), (1, 1, 2, 2), strict=True):
        assert stepped(guard, optimizer, model, x) == (not x.isfinite())
        assert (model.last.item(), len(model.all), model.all[-1].item()) == (last, number, last)
        assert (model.first is None) == (number == 2)
    assert [str(x.item()) for x in data] == ["1.0", "inf", "2.0", "nan"]


class Replacing(nn.Module):
    """Its forward pass writes to no buffer, but replaces them, by its input, and by one of another shape."""

    def __init__(self, device: str = "cpu"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, device=device))
        self.register_buffer("last", torch.zeros(2, device=device))
        self.register_buffer("shaped", torch.zeros(2, device=device))
        self.register_buffer("nothing", None)

    def forward(self, x: Any) -> Any:
        self.last, self.nothing = x, 0.5 * (x if self.nothing is None else self.nothing + x)
        self.shaped = x.new_zeros(2 + len(self._buffers)) + x[0]
        if "added" not in self._buffers:
            self.register_buffer("added", x.clone())
        self.added = 0.5 * self.added
        return (self.weight * x).sum()


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("bad", [0, 1, 3])
@pytest.mark.parametrize("inner", [True, False], ids=["part", "whole"])
def test_buffers_that_a_forward_pass_replaces_or_adds_are_held(kind: str, bad: int, inner: bool):
    good = [torch.tensor([1.0, float(index)]) for index in range(4)]
    states = []
    for inputs in (good, [*good[:bad], torch.tensor([math.nan, 1.0]), *good[bad:]]):
        kept = copy.deepcopy(inputs)
        model = nn.Sequential(nn.Identity(), Replacing()) if inner else Replacing()
        optimizer, guard = OPTIMIZERS[kind](model.parameters()), StepGuard(hold=model)
        for x in inputs:
            loss = model(x)
            loss.backward()
            guard.step(optimizer, loss=loss)
            optimizer.zero_grad()
        states.append(model.state_dict())
        # It is not the model's.
        assert all(torch.equal(one, other) or other.isnan().any() for one, other in zip(inputs, kept, strict=True))
    assert equal(*states)


def test_a_module_that_has_no_buffer_before_its_first_batch_is_held():
    class Lazy(nn.Linear):
        def forward(self, x: Any) -> Any:
            if "mean" not in self._buffers:
                self.register_buffer("mean", x.mean(0))
            self.mean.mul_(0.5)
            return super().forward(x)

    states = []
    for order in ((0, 1), (None, 0, 1), (0, None, 1)):
        torch.manual_seed(2)
        model = Lazy(6, 1)
        optimizer, guard = torch.optim.SGD(model.parameters(), lr=0.1), StepGuard(hold=model)
        for index in order:
            loss = model(batches(2)[index or 0] * (math.nan if index is None else 1.0)).square().mean()
            loss.backward()
            guard.step(optimizer, loss=loss)
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert equal(states[0], states[1])
    assert equal(states[0], states[2])
