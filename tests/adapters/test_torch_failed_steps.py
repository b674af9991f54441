"""A step of torch that fails: no gradients of a later loss, which nothing has divided, are stepped with afterwards."""

import contextlib
from collections.abc import Iterator

import pytest
from axes_torch import GradScaler, torch

from gradscale import CallOrderError

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


class OnceFailing(GradScaler):
    """Its ``unscale_``, which a user has extended, fails once."""

    fails = True

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        if self.fails:
            raise RuntimeError


class Training:
    """One parameter whose gradient is 1, and steps that fail while ``fails``."""

    def __init__(self, scaler: GradScaler, **options):
        self.scaler, self.fails = scaler, True
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.weight], 1.0, **options)

    def backward(self, loss_times: float = 1.0):
        self.optimizer.zero_grad()
        self.scaler.scale(self.weight.sum() * loss_times).backward()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        def hook(*_):
            raise RuntimeError

        handle = self.optimizer.register_step_pre_hook(hook)
        with pytest.raises(RuntimeError):
            yield
        handle.remove()

    def assert_nothing_can_be_stepped(self):
        self.backward()
        with pytest.raises(CallOrderError):
            self.scaler.step(self.optimizer)
        assert self.weight.tolist() == [1.0, 1.0]


def test_gradients_of_a_loss_after_an_extended_unscale_has_failed_are_not_stepped():
    training = Training(OnceFailing("cpu", init_scale=1024.0))
    training.backward()
    with pytest.raises(RuntimeError):
        training.scaler.step(training.optimizer)
    training.scaler.fails = False
    training.assert_nothing_can_be_stepped()


def test_flags_that_a_framework_sets_after_a_fused_step_has_failed_do_not_let_undivided_gradients_through():
    training = Training(GradScaler("cpu", init_scale=1024.0), fused=True)
    training.backward()
    with training.failing():
        training.scaler.step(training.optimizer)
    states = training.scaler._per_optimizer_states
    states[id(training.optimizer)]["found_inf_per_device"] = {CPU: torch.tensor(0.0)}
    training.assert_nothing_can_be_stepped()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_that_is_skipped_and_fails_can_be_made_again_and_is_skipped(fused: bool):
    training = Training(GradScaler("cpu", init_scale=1024.0), fused=fused)
    training.backward(float("inf"))
    training.scaler.unscale_(training.optimizer)
    if fused:
        with training.failing():
            training.scaler.step(training.optimizer)
    training.backward()
    training.scaler.step(training.optimizer)
    training.scaler.update()
    assert training.scaler.last_step(training.optimizer).reason == "overflow"
    assert (training.weight.tolist(), training.scaler.get_scale()) == ([1.0, 1.0], 512.0)


def test_gradients_left_by_an_abandoned_iteration_are_not_stepped_two_loads_and_an_update_later():
    scaler, one = GradScaler("cpu", init_scale=1024.0), GradScaler("cpu", init_scale=1.0).state_dict()
    training, other = Training(scaler), Training(scaler)
    scaler.scale(training.weight.sum() + other.weight.sum()).backward()
    scaler.unscale_(other.optimizer)
    scaler.load_state_dict(one)
    scaler.refuse(other.optimizer)
    other.weight.grad.fill_(float("inf"))
    scaler.step(other.optimizer)
    scaler.update()
    scaler.load_state_dict(one)
    with pytest.raises(CallOrderError):
        scaler.step(training.optimizer)
    assert training.weight.tolist() == [1.0, 1.0]
