"""What the core asks of an array library, seen on array-api-strict: exactly what it lists, and no value of a device."""

import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from libraries import Library
from optimizers import Tree

import gradscale
from gradscale import DynamicScale, GradScaler, ShardedGradScaler, StaticScale, presets
from gradscale.core import arithmetic, summaries
from gradscale.policies import spikes
from gradscale.testing import run_ranks

# Of an array's class, what is not of the standard's array object.
OWN = ("__new__", "__init__", "__repr__", "__str__", "__hash__", "__array_namespace__")
GROWTHS = ("interval", "first_interval_plus_one", "interval_plus_one")
REFILLS = (("clean_step",), ("growth", "backoff"))
BOUNDS: tuple[dict[str, Any], ...] = (
    {"at_min": "clamp"},
    {"at_min": "hold"},
    {"at_min": "raise", "max_scale": 2.0**20},
)


class Recorded:
    """The array namespace and arrays of a library, which note what gradscale itself asks them for."""

    def __init__(self, library: Library, patch: pytest.MonkeyPatch):
        self.functions: set[str] = set()
        self.members: set[str] = set()
        recorded, xp = self, library.xp

        class Namespace:
            __name__ = xp.__name__

            def __getattr__(self, name: str):
                if _asked_by_gradscale():
                    recorded.functions.add(name)
                return getattr(xp, name)

        namespace = Namespace()
        kind = type(library.asarray(1.0))
        patch.setattr(kind, "__array_namespace__", lambda _self, **_options: namespace)
        for name, member in [*vars(kind).items()]:
            is_private = name.startswith("_") and not name.endswith("__")
            if (callable(member) or isinstance(member, property)) and not is_private and name not in OWN:
                patch.setattr(kind, name, self._member(name, member))

    def _member(self, name: str, original):
        def call(*args, **kwargs):
            if _asked_by_gradscale():
                self.members.add(name)
            return original.__get__(*args) if isinstance(original, property) else original(*args, **kwargs)

        return property(call) if isinstance(original, property) else call


def _asked_by_gradscale() -> bool:
    """Tell whether gradscale, or array_api_compat for it, uses the library: what the library uses itself is its own."""
    name = sys._getframe(2).f_globals["__name__"]
    return str(name).partition(".")[0] in ("gradscale", "array_api_compat")


@pytest.fixture
def recorded(strict: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """Return the record of what is asked for from now on."""
    record = Recorded(strict, monkeypatch)
    yield record
    monkeypatch.undo()


def policies():
    """Return a policy with each setting that computes something of its own."""
    rules = [
        DynamicScale(growth_after=after, hysteresis=patience, hysteresis_refill=refill, growth_factor=factor, **bound)
        for after in GROWTHS
        for refill in REFILLS
        for patience in (1, 3)
        for factor in (2.0, 1.7)
        for bound in BOUNDS
    ]
    known = [presets.named(name) for name in presets.names()]
    return [*rules, *(DynamicScale(tolerance=0.3, **bound) for bound in BOUNDS), StaticScale(8.0), *known]


def functional_step(library: Library, policy):
    """Use each function of the core once, with a clean step and with an overflow; the state after them."""
    gradients = [library.asarray([1.0, 2.0], dtype) for dtype in ("float32", "float64", "complex64", "complex128")]
    gradients.append(library.asarray([3], "int32"))
    bad = [library.asarray([math.inf])]
    state = policy.init(gradients[0])
    gradscale.scale([library.asarray(1.0), *gradients], state)
    for grads in (gradients, bad):
        unscaled, nonfinite = gradscale.unscale(grads, state)
        gradscale.unscale(grads, state, dtype=library.dtype("float64"))
        gradscale.unscale(grads, state, out=grads)
        chosen = gradscale.select(nonfinite == library.asarray(0, "int32"), unscaled, grads)
        assert len(chosen) == len(grads)
        state = policy.backoff(policy.update(state, nonfinite=nonfinite))
        policy.update(state, nonfinite=nonfinite != library.asarray(0, "int32"))
        policy.at_min_scale(state)
        arithmetic.fingerprint(state)
    return state


def several_devices(library: Library):
    """Use gradients, a verdict and a predicate on another device than the state's."""
    away = library.xp.Device("device1")
    gradients = [library.asarray([1.0, 2.0]), library.asarray([1.0], device=away)]
    policy = DynamicScale()
    state = policy.init(gradients[0])
    gradscale.scale(gradients, state)
    unscaled, nonfinite = gradscale.unscale(gradients, state)
    assert nonfinite.shape == ()
    gradscale.select(library.asarray(True, "bool", device=away), unscaled, gradients)
    policy.update(state, nonfinite=library.asarray(0, "int32", device=away))


LISTED = {*arithmetic.STANDARD_FUNCTIONS, *arithmetic.STANDARD_DTYPES}
# What not all use, and the functions that it needs beside.
FEATURES: dict[str, tuple[Iterable[str], dict[str, Any]]] = {
    "core": ((), {}),
    "diagnosis": (summaries.STANDARD_FUNCTIONS, {"diagnose": "on_overflow"}),
    "clipping": (arithmetic.CLIPPING_FUNCTIONS, {}),
    "spikes": (spikes.STANDARD_FUNCTIONS, {"skip": spikes.SkipSpikes(window=2)}),
}


def train(library: Library, scaler: GradScaler, feature: str):
    """Use the scaler's whole protocol, gradients of each kind on two devices, and what it saves."""
    away = library.xp.Device("device1")
    for dtype, loss, value in (
        ("float32", 2.0, 1.0),
        ("float64", 2.0, math.nan),
        ("complex64", 2.0, 1.0),
        ("float32", 9.0, 1.0),
    ):
        optimizer = Tree([library.asarray([value, math.inf if value != 1.0 else 2.0], dtype)])
        optimizer.grads.append(library.asarray([1.0], device=away))
        scaler.scale(library.asarray(loss))
        scaler.unscale_(optimizer, **({"max_norm": 1.0, "norm_over": "group"} if feature == "clipping" else {}))
        scaler.step(optimizer)
        if feature == "diagnosis":
            scaler.diagnose(optimizer, gather=True, loss=library.asarray(2.0))
        scaler.update()
        assert optimizer.steps == (value == 1.0 and (feature, loss) != ("spikes", 9.0))
    scaler.load_state_dict(scaler.state_dict())
    scaler.scale(library.asarray(1.0))
    scaler.update(library.asarray([4.0]))
    assert scaler.get_scale() == 4.0


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_asks_for_the_listed_functions_and_members_and_no_others(
    strict: Library, recorded: Recorded, feature: str
):
    listed, options = FEATURES[feature]
    for policy in policies() if feature == "core" else ():
        strict.state(functional_step(strict, policy))
    several_devices(strict)
    for options["policy"] in (DynamicScale(), DynamicScale(at_min="raise")):
        train(strict, GradScaler(**options), feature)
        run_ranks(2, lambda group: train(strict, ShardedGradScaler(group=group, **options), feature))
    assert recorded.functions - LISTED == set(listed)
    # What is saved of a window are floats.
    assert recorded.members <= {*arithmetic.STANDARD_MEMBERS, *["__float__"] * (feature == "spikes")}
    if feature == "core":
        assert (recorded.functions, recorded.members) == (LISTED, set(arithmetic.STANDARD_MEMBERS))


def test_the_record_sees_a_function_that_the_core_uses_anew(strict: Library, recorded: Recorded):
    source = "def isfinite_and_more(xp, x):\n    return xp.isfinite(xp.tan(x) ** x)\n"
    scope: dict[str, Any] = {"__name__": "gradscale.novelty"}
    exec(source, scope)
    x = strict.asarray([1.0])
    scope["isfinite_and_more"](x.__array_namespace__(), x)
    assert (recorded.functions, recorded.members) == ({"isfinite", "tan"}, {"__pow__"})
    # What the test itself uses is not counted.
    assert (x + x, recorded.members)[1] == {"__pow__"}


READS = ("__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__", "__dlpack__", "__buffer__")


class HostReadError(Exception):
    """A value was read."""


@pytest.fixture
def unreadable(strict: Library, monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes strict arrays unreadable from now on."""

    def forbid():
        kind = type(strict.asarray(1.0))
        for name in READS:
            if hasattr(kind, name):

                def read(*_args, _name: str = name, **_kwargs):
                    raise HostReadError(_name)

                monkeypatch.setattr(kind, name, read)

    yield forbid
    monkeypatch.undo()


def test_the_pure_core_reads_nothing(strict: Library, unreadable):
    like = strict.asarray(1.0)
    unreadable()
    for policy in policies():
        functional_step(strict, policy)
    with pytest.raises(HostReadError):
        bool(like)
