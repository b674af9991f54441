"""What the core asks of a library: exactly what it lists, and no value of a device; what check_library finds."""

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from libraries import Library
from optimizers import Tree

import gradscale
from gradscale import BackendNotAvailableError, DynamicScale, GradScaler, ShardedGradScaler
from gradscale.core import arithmetic, summaries
from gradscale.core.arithmetic import device, device_kwargs
from gradscale.policies import spikes
from gradscale.testing import check_library, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

# Of an array's class, what is not of the standard's array object.
OWN = ("__new__", "__init__", "__repr__", "__str__", "__hash__", "__array_namespace__")
# What not all use, and the functions that it needs beside.
FEATURES: dict[str, tuple[Iterable[str], dict[str, Any]]] = {
    "core": ((), {}),
    "diagnosis": (summaries.STANDARD_FUNCTIONS, {"diagnose": "on_overflow"}),
    "clipping": (arithmetic.CLIPPING_FUNCTIONS, {}),
    "spikes": (spikes.STANDARD_FUNCTIONS, {"skip": spikes.SkipSpikes(window=2)}),
}
LISTED = {*arithmetic.STANDARD_FUNCTIONS, *arithmetic.STANDARD_DTYPES}
FUNCTIONS = sorted({*arithmetic.STANDARD_FUNCTIONS, *(name for listed, _ in FEATURES.values() for name in listed)})
# Of those that compare every Python object has one, and a library may know of no device.
COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__ge__"}
MEMBERS = sorted(set(arithmetic.STANDARD_MEMBERS) - COMPARISONS - {"device", "to_device"})


class Namespace:
    """A namespace that notes what gradscale asks it for, and has what another has, but for what is not or replaced."""

    __name__ = "crippled"

    def __init__(self, xp, without: str = "", **replaced):
        self._xp, self._without, self.noted = xp, without, set[str]()
        vars(self).update(replaced)

    def __getattr__(self, name: str):
        if _asked_by_gradscale():
            self.noted.add(name)
        if name == self._without:
            raise AttributeError(name)
        return getattr(self._xp, name)


def _asked_by_gradscale() -> bool:
    """Tell whether gradscale, or array_api_compat for it, uses the library: what the library uses itself is its own."""
    name = sys._getframe(2).f_globals["__name__"]
    return str(name).partition(".")[0] in ("gradscale", "array_api_compat")


@pytest.fixture(autouse=True)
def _registry_forgets():
    """Make the registry look at each library anew."""
    gradscale.registry.refresh()
    yield
    gradscale.registry.refresh()


@pytest.fixture
def cripple(strict: Library, monkeypatch: pytest.MonkeyPatch):
    """Return a function that takes something away from array-api-strict, or replaces it, and returns an array."""
    x = strict.asarray([1.0, 2.0])

    def crippled(without: str = "", **replaced):
        namespace = Namespace(strict.xp, without, **replaced)
        monkeypatch.setattr(type(x), "__array_namespace__", lambda _self, **_options: namespace)
        return x

    return crippled


class Recorded:
    """The functions and members of its arrays that gradscale itself asks a library for."""

    def __init__(self, library: Library, patch: pytest.MonkeyPatch):
        namespace, self.members = Namespace(library.xp), set[str]()
        self.functions, kind = namespace.noted, type(library.asarray(1.0))
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


@pytest.fixture
def recorded(strict: Library, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Return the record of what is asked for from now on."""
    return Recorded(strict, monkeypatch)


# With each setting that computes something of its own.
POLICIES = (
    DynamicScale(growth_factor=1.7, growth_after="interval_plus_one"),
    DynamicScale(hysteresis=3, hysteresis_refill=("growth", "backoff"), at_min="hold"),
    DynamicScale(tolerance=0.3, at_min="raise", max_scale=2.0**20, growth_after="first_interval_plus_one"),
    gradscale.StaticScale(8.0),
)


def functional_step(library: Library, policy):
    """Use each function of the core once, with a clean step and with an overflow."""
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


def train(library: Library, scaler: GradScaler, feature: str):
    """Use the scaler's whole protocol, gradients of each kind on two devices, and what it saves."""
    away, optimizer = library.xp.Device("device1"), Tree()
    for dtype, loss, value in (
        ("float32", 2.0, 1.0),
        ("float64", 2.0, math.nan),
        ("complex64", 2.0, 1.0),
        ("float32", 9.0, 1.0),
    ):
        first = library.asarray([value, math.inf if value != 1.0 else 2.0], dtype)
        optimizer.grads, before = [first, library.asarray([1.0], device=away)], optimizer.steps
        scaler.scale(library.asarray(loss))
        scaler.unscale_(optimizer, **({"max_norm": 1.0, "norm_over": "group"} if feature == "clipping" else {}))
        scaler.step(optimizer)
        if feature == "diagnosis":
            scaler.diagnose(optimizer, gather=True, loss=library.asarray(2.0))
        scaler.update()
        assert optimizer.steps - before == (value == 1.0 and (feature, loss) != ("spikes", 9.0))
    scaler.load_state_dict(scaler.state_dict())
    scaler.scale(library.asarray(1.0))
    scaler.update(library.asarray([4.0]))
    assert scaler.get_scale() == 4.0


# What looks at a value, on a device or not.
READS = {"__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__", "__dlpack__", "__buffer__"}


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_asks_for_the_listed_functions_and_members_and_no_others_and_the_pure_core_reads_nothing(
    strict: Library, recorded: Recorded, feature: str
):
    listed, options = FEATURES[feature]
    for policy in POLICIES if feature == "core" else ():
        functional_step(strict, policy)
    assert recorded.members.isdisjoint(READS)
    for options["policy"] in (DynamicScale(at_min="raise"), DynamicScale())[: 1 + (feature == "core")]:
        train(strict, GradScaler(**options), feature)
        run_ranks(2, lambda group: train(strict, ShardedGradScaler(group=group, **options), feature))
    if feature == "spikes":
        # Where there is no float64, differences are divided before they are squared.
        narrow = strict.xp.asarray(1.0, dtype=strict.xp.float32, device=strict.xp.Device("no_float64"))
        options["skip"].judge(options["skip"].init(narrow), narrow)
    assert recorded.functions - LISTED == set(listed)
    # What is saved of a window are floats.
    assert recorded.members <= {*arithmetic.STANDARD_MEMBERS, *["__float__"] * (feature == "spikes")}
    if feature == "core":
        assert (recorded.functions, recorded.members) == (LISTED, set(arithmetic.STANDARD_MEMBERS))


def test_the_record_sees_a_function_that_the_core_uses_anew_and_a_read(strict: Library, recorded: Recorded):
    source = "def isfinite_and_more(xp, x):\n    return bool(xp.isfinite(xp.tan(x) ** x))\n"
    scope: dict[str, Any] = {"__name__": "gradscale.novelty"}
    exec(source, scope)
    x = strict.asarray(1.0)
    scope["isfinite_and_more"](x.__array_namespace__(), x)
    assert (recorded.functions, recorded.members) == ({"isfinite", "tan"}, {"__pow__", "__bool__"})
    # What the test itself uses is not counted.
    assert (x + x, len(recorded.members))[1] == 2


def test_the_pure_core_of_every_library_passes(arrays: Library):
    check_library(arrays.asarray([1.0, 2.0]))
    with pytest.raises(gradscale.InvalidTypeError, match=r"like must be an array.*got 'text'"):
        check_library("text")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*FUNCTIONS, "float32", "int32"])
def test_each_function_and_dtype_that_is_missing_is_named(cripple: Callable[..., Any], name: str):
    x = cripple(name)
    with pytest.raises(BackendNotAvailableError, match=rf"crippled lacks.*\b{name} missing.*write an adapter"):
        check_library(x)
    if name == "isfinite":
        told = "crippled lacks what gradscale needs.*functions isfinite missing and no adapter registered: write"
        for use in (DynamicScale().init, GradScaler().scale):
            with pytest.raises(BackendNotAvailableError, match=told):
                use(x)


@pytest.mark.filterwarnings("ignore:The 2021.12 version")
def test_a_library_of_an_older_standard_is_told_which_one_it_needs(strict: Library):
    x = strict.asarray([1.0, 2.0])
    told = r"lacks what .* standard of 2023\.12 or newer, got functions __array_namespace_info__ missing"
    for version in ("2021.12", "2022.12"):
        with strict.xp.ArrayAPIStrictFlags(api_version=version):
            for use, said in ((DynamicScale().init, told), (GradScaler().scale, told), (check_library, "namespace")):
                with pytest.raises(BackendNotAvailableError, match=said):
                    use(x)


@pytest.mark.parametrize("name", MEMBERS)
def test_each_member_that_is_missing_is_named(strict: Library, name: str):
    had = dict.fromkeys({*arithmetic.STANDARD_MEMBERS} - COMPARISONS - {name}, ())
    kind = type("Array", (), {**had, "__array_namespace__": lambda _self, **_options: strict.xp})
    assert arithmetic.lacks(kind()) == {"members of arrays": [name]}
    # The host reads whole arrays, where they can be read so.
    kind.tolist = ()
    assert arithmetic.lacks(kind()) == ({} if name == "__int__" else {"members of arrays": [name]})


def test_arrays_are_made_on_a_device_only_if_their_library_knows_of_devices(strict: Library):
    away = strict.xp.Device("device1")
    x = strict.asarray(1.0, device=away)
    assert strict.asarray(2.0, **device_kwargs(device(x))).device == away
    assert (device(object()), device_kwargs(device(object()))) == (None, {})


def test_a_function_that_does_not_take_what_the_core_gives_is_named(cripple: Callable[..., Any]):
    def stack(_arrays):
        raise ValueError("only twins can be stacked")

    with pytest.raises(BackendNotAvailableError, match=r"crippled fails in gradscale's bits.*only twins can be"):
        check_library(cripple(stack=stack))


# What each function does instead of its own work.
WRONG = {"all": "any", "logical_not": "itself", "max": "min", "zeros_like": "ones_like"}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_found(strict: Library, cripple: Callable[..., Any], name: str):
    with pytest.raises(AssertionError, match="must be"):
        check_library(cripple(**{name: getattr(strict.xp, WRONG[name], lambda x: x)}))
