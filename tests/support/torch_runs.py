"""Random training runs that two scalers of torch's kind make side by side, compared bit for bit after every call."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from axes import require
from hypothesis import strategies as st

__all__ = ["KINDS", "Iteration", "Treatment", "assert_same", "assert_same_runs", "iterations", "private_states"]

# Optimizers by what they are and how they are implemented.
KINDS = [
    *(f"{name}-{variant}" for name in ("Adam", "AdamW", "SGD", "Adagrad") for variant in ("foreach", "fused")),
    "Adam-single",
    "SGD-sparse",
]
_SETTINGS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 0.05},
    "AdamW": {"lr": 0.05, "weight_decay": 0.1, "amsgrad": True},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 0.05},
}
_BATCH = 4
_TOKENS = 5


@dataclasses.dataclass(frozen=True)
class Treatment:
    """What an iteration does to one optimizer."""

    unscale: bool = False
    clip: str = "no"
    step: bool = True


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One iteration of a run.

    Attributes
    ----------
    treatments : pair of Treatment
        For the two optimizers.
    container : str
        What the two losses are passed to ``scale`` in; "apart" for a call for each.
    micro_batches : int
        How many backward passes are accumulated.
    precision : str or None
        The dtype of autocast.
    penalty : bool
        Whether the norm of the gradients is added to the loss, which makes a second backward pass.
    bad : tuple of (int, float), optional
        Which parameter of all gets this number into its gradient.
    new_scale : tuple of (float, str), optional
        What ``update`` is given, and as what.
    setting : tuple of (str, number), optional
        What is set at the end.
    restart : str, optional
        How the scaler is replaced at the end by a restored one.
    """

    treatments: tuple[Treatment, Treatment] = (Treatment(), Treatment())
    container: str = "apart"
    micro_batches: int = 1
    precision: str | None = None
    penalty: bool = False
    bad: tuple[int, float] | None = None
    new_scale: tuple[float, str] | None = None
    setting: tuple[str, float] | None = None
    restart: str | None = None


_treatments = st.builds(
    Treatment,
    unscale=st.booleans(),
    clip=st.sampled_from(["no", "norm", "value"]),
    step=st.sampled_from([True, True, True, False]),
)
_settings = st.one_of(
    st.tuples(st.just("growth_factor"), st.sampled_from([2.0, 1.7, 4.0])),
    st.tuples(st.just("backoff_factor"), st.sampled_from([0.5, 0.3, 0.9])),
    st.tuples(st.just("growth_interval"), st.integers(1, 4)),
)
_iterations = st.builds(
    Iteration,
    # At least one is judged: torch cannot update otherwise.
    treatments=st.tuples(_treatments, _treatments).filter(lambda pair: any(each.step for each in pair)),
    container=st.sampled_from(["apart", "list", "tuple", "nested", "generator"]),
    micro_batches=st.sampled_from([1, 1, 2, 3]),
    precision=st.sampled_from([None, None, "bfloat16", "float16"]),
    penalty=st.sampled_from([False, False, False, True]),
    bad=st.one_of(st.none(), st.tuples(st.integers(0, 7), st.sampled_from([math.inf, -math.inf, math.nan]))),
    new_scale=st.one_of(
        *[st.none()] * 3, st.tuples(st.sampled_from([512.0, 3000.1]), st.sampled_from(["float", "float32", "float64"]))
    ),
    setting=st.one_of(st.none(), st.none(), _settings),
    restart=st.sampled_from([None, None, None, "state_dict", "pickle", "deepcopy"]),
)


def iterations(most: int) -> st.SearchStrategy[list[Iteration]]:
    """Return a strategy for runs of up to so many iterations."""
    return st.lists(_iterations, min_size=1, max_size=most)


class Side:
    """One of two equal runs: a scaler, two models, and an optimizer for each.

    Parameters
    ----------
    make_scaler : callable
        Takes keyword arguments.
    kinds : pair of str
        Of the optimizers.
    seed : int
        Of weights and data.
    settings : dict
        The arguments of the scaler.
    """

    def __init__(
        self, make_scaler: Callable[..., Any], kinds: tuple[str, str], seed: int, settings: dict[str, Any]
    ) -> None:
        self.torch = require("torch")
        self.make_scaler = make_scaler
        self.scaler = make_scaler(**settings)
        self.generator = self.torch.Generator().manual_seed(seed)
        self.models = [self._model(kind) for kind in kinds]
        pairs = zip(self.models, kinds, strict=True)
        self.optimizers = [self._optimizer(model.parameters(), kind) for model, kind in pairs]

    def _model(self, kind: str) -> Any:
        nn = self.torch.nn
        first = nn.Embedding(_TOKENS, 3, sparse=True) if kind.endswith("sparse") else nn.Linear(_TOKENS, 3)
        model = nn.Sequential(first, nn.Tanh(), nn.Linear(3, 2))
        with self.torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(self._normal(parameter.shape))
        return model

    def _normal(self, shape: Any) -> Any:
        return self.torch.randn(shape, generator=self.generator)

    def _optimizer(self, parameters: Any, kind: str) -> Any:
        name, variant = kind.split("-")
        base: Any = getattr(self.torch.optim, name)

        class Counting(base):  # type: ignore[misc]
            """Returns how often it has been called."""

            calls = 0

            def step(self, closure: Any = None) -> int:
                super().step(closure)
                self.calls += 1
                return self.calls

        options = dict(_SETTINGS[name])
        if variant == "sparse":
            del options["nesterov"]
        options |= {"foreach": {"foreach": True}, "fused": {"fused": True}}.get(variant, {"foreach": False})
        optimizer = Counting(parameters, **options)
        if kind == "SGD-fused":
            # When the first step is skipped in its kernel, its momentum stays uninitialised memory.
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = self._normal(parameter.shape)
            optimizer.step()
        return optimizer

    def loss(self, model: Any, precision: str | None) -> Any:
        """Return a model's loss on new random data."""
        torch = self.torch
        if isinstance(model[0], torch.nn.Embedding):
            inputs = torch.randint(_TOKENS, (_BATCH,), generator=self.generator)
        else:
            inputs = self._normal((_BATCH, _TOKENS))
        targets = self._normal((_BATCH, 2))
        autocast = torch.autocast("cpu", dtype=getattr(torch, precision)) if precision else contextlib.nullcontext()
        with autocast:
            return torch.nn.functional.mse_loss(model(inputs).float(), targets)

    def penalised(self, model: Any, loss: Any) -> Any:
        """Return the loss with the norm of its gradients added."""
        if isinstance(model[0], self.torch.nn.Embedding):
            return loss
        gradients = self.torch.autograd.grad(self.scaler.scale(loss), list(model.parameters()), create_graph=True)
        inverse = 1.0 / self.scaler.get_scale()
        squares = [(gradient * inverse).square().sum() for gradient in gradients]
        return loss + self.torch.stack(squares).sum().sqrt()

    def scaled(self, losses: list[Any], container: str) -> list[Any]:
        """Return scaled losses, passed to the scaler in a container."""
        scale = self.scaler.scale
        first, second = losses
        if container == "apart":
            return [scale(first), scale(second)]
        if container == "list":
            result = scale(losses)
            assert type(result) is list
            return result
        if container == "tuple":
            result = scale(tuple(losses))
            assert type(result) is tuple
            return list(result)
        if container == "generator":
            return list(scale(loss for loss in losses))
        [inner], last = scale(([first], second))
        return [inner, last]

    def spoil(self, number: int, value: float) -> None:
        """Put a number into the gradient of one of all parameters."""
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        gradient = parameters[number % len(parameters)].grad
        values = gradient._values() if gradient.is_sparse else gradient
        values.view(-1)[number % values.numel()] = value

    def clip(self, model: Any, how: str) -> Any:
        """Clip the gradients of a model."""
        utilities = self.torch.nn.utils
        if how == "norm" and not isinstance(model[0], self.torch.nn.Embedding):
            return utilities.clip_grad_norm_(model.parameters(), 0.5)
        if how == "value":
            dense = [parameter for parameter in model.parameters() if not parameter.grad.is_sparse]
            utilities.clip_grad_value_(dense, 0.1)
        return None

    def observe(self, call: str, returned: Any = None) -> dict[str, Any]:
        """Return everything that a call may have changed."""
        scaler = self.scaler
        return {
            "call": call,
            "returned": returned,
            "scale": scaler._scale,
            "get_scale": scaler.get_scale(),
            "tracker": scaler._growth_tracker,
            "get_tracker": scaler._get_growth_tracker(),
            "states": [private_states(scaler, optimizer) for optimizer in self.optimizers],
            "parameters": [list(model.parameters()) for model in self.models],
            "gradients": [[parameter.grad for parameter in model.parameters()] for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "attributes": [
                [hasattr(optimizer, name) for name in ("grad_scale", "found_inf")] for optimizer in self.optimizers
            ],
        }

    def run(self, plan: list[Iteration]) -> Iterator[dict[str, Any]]:
        """Train, and yield what is to be seen after every call of the scaler."""
        for iteration in plan:
            yield from self._backward(iteration)
            for model, optimizer, treatment in zip(self.models, self.optimizers, iteration.treatments, strict=True):
                if treatment.unscale:
                    yield self.observe("unscale_", self.scaler.unscale_(optimizer))
                    yield self.observe("clip", self.clip(model, treatment.clip))
            for optimizer, treatment in zip(self.optimizers, iteration.treatments, strict=True):
                if treatment.step:
                    yield self.observe("step", self.scaler.step(optimizer))
            yield self.observe("update", self._update(iteration.new_scale))
            if iteration.setting is not None:
                yield self.observe("set", self._set(*iteration.setting))
            if iteration.restart is not None:
                self.scaler = self._restored(iteration.restart)
                yield self.observe(iteration.restart, self.scaler.state_dict())

    def _backward(self, iteration: Iteration) -> Iterator[dict[str, Any]]:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for _ in range(iteration.micro_batches):
            losses = [self.loss(model, iteration.precision) for model in self.models]
            if iteration.penalty:
                losses = [self.penalised(*pair) for pair in zip(self.models, losses, strict=True)]
            scaled = self.scaled([loss / iteration.micro_batches for loss in losses], iteration.container)
            yield self.observe("scale", scaled)
            for loss in scaled:
                loss.backward()
        if iteration.bad is not None:
            self.spoil(*iteration.bad)
        yield self.observe("backward")

    def _update(self, new_scale: tuple[float, str] | None) -> Any:
        if new_scale is None:
            return self.scaler.update()
        value, kind = new_scale
        return self.scaler.update(
            value if kind == "float" else self.torch.full((), value, dtype=getattr(self.torch, kind))
        )

    def _set(self, name: str, value: float) -> tuple[Any, ...]:
        # Torch never grows again when the tracker is beyond the interval.
        if name != "growth_interval" or value > self.scaler._get_growth_tracker():
            getattr(self.scaler, f"set_{name}")(value)
        names = ("growth_factor", "backoff_factor", "growth_interval")
        return tuple(getattr(self.scaler, f"get_{each}")() for each in names)

    def _restored(self, how: str) -> Any:
        if how == "pickle":
            return pickle.loads(pickle.dumps(self.scaler))
        if how == "deepcopy":
            return copy.deepcopy(self.scaler)
        restored = self.make_scaler()
        restored.load_state_dict(self.scaler.state_dict())
        return restored


def private_states(scaler: Any, optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's stage and, by device, whether something was found; does not create an entry."""
    state = scaler._per_optimizer_states.get(id(optimizer))
    if state is None:
        return {"stage": "READY", "found": {}}
    found = state["found_inf_per_device"]
    return {"stage": state["stage"].name, "found": {str(device): flag.item() for device, flag in found.items()}}


def assert_same_runs(
    make_one: Callable[..., Any],
    make_other: Callable[..., Any],
    kinds: tuple[str, str],
    plan: list[Iteration],
    *,
    seed: int = 0,
    **settings: Any,
) -> None:
    """Assert that two scalers make the same run: every bit, after every call."""
    one, other = (Side(make, kinds, seed, settings) for make in (make_one, make_other))
    for step, (seen, expected) in enumerate(zip(one.run(plan), other.run(plan), strict=True)):
        assert_same(seen, expected, f"call {step}, {expected['call']}")


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Assert that two values are equal: containers by their parts, tensors in dtype, layout and every bit."""
    torch = require("torch")
    assert type(one) is type(other), f"{where}: {one!r} is not {other!r}"
    if isinstance(one, torch.Tensor):
        _assert_same_tensors(one.detach(), other.detach(), where)
    elif isinstance(one, dict):
        assert list(one) == list(other), f"{where}: {list(one)} is not {list(other)}"
        for key in one:
            assert_same(one[key], other[key], f"{where}, {key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), f"{where}: {len(one)} is not {len(other)}"
        for index, (part, its_other) in enumerate(zip(one, other, strict=True)):
            assert_same(part, its_other, f"{where} {index}")
    else:
        assert one == other or (one != one and other != other), f"{where}: {one!r} is not {other!r}"


def _assert_same_tensors(one: Any, other: Any, where: str) -> None:
    torch = require("torch")
    kinds = [(x.dtype, x.layout, x.device, x.shape, x.requires_grad) for x in (one, other)]
    assert kinds[0] == kinds[1], f"{where}: {kinds[0]} is not {kinds[1]}"
    if one.layout == torch.sparse_coo:
        assert one.is_coalesced() == other.is_coalesced(), where
        assert torch.equal(one._indices(), other._indices()), where
        one, other = one._values(), other._values()
    if one.dtype.is_floating_point:
        words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
        same = torch.equal(one.contiguous().view(words), other.contiguous().view(words))
    else:
        same = torch.equal(one, other)
    assert same, f"{where}: {one} is not {other}"
