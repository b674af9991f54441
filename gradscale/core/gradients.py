"""An optimizer's gradients: where they are, their names, and how unscaled ones go back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeGuard, cast

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import tree, validation
from gradscale.core.arithmetic import (
    Kind,
    UnitState,
    as_0d_array,
    clip_factor_of,
    device,
    dtype_kind,
    float32_bits,
    is_floating,
    nonfinite_flag,
)
from gradscale.core.protocols import (
    Array,
    Collectives,
    Namespace,
    Optimizer,
    OptimizerWithGrads,
    OptimizerWithGroups,
    ScaleState,
)
from gradscale.core.tree import first_floating, leaves_and_dtypes
from gradscale.errors import InvalidTypeError, InvalidValueError, reading, short_repr

if TYPE_CHECKING:
    from gradscale.core.backend import Backend

_Assign: TypeAlias = Callable[[dict[int, Array]], None]

_reading = reading("an optimizer")

_INFINITY_BITS = 0x7F800000


class ScaleView(Protocol):
    """What unscaling has to know of the scaler's state."""

    state_adapter: Backend
    """The adapter of the state's library."""
    xp: Namespace
    """Its namespace."""
    is_static: bool
    """Whether no update changes the scale."""

    def scale_lower_bound(self, state: ScaleState) -> float:
        """Return the smallest value that the scale of a state can have, as far as the host knows without a read."""

    def is_one(self, state: ScaleState) -> bool:
        """Tell whether the scale of a state is 1, and stays so, as far as the host knows without a read."""


class Exchanging(Protocol):
    """The group whose ranks hold parts of the gradients."""

    rank: int
    size: int

    def announce(self, like: Array) -> None:
        """Tell the other ranks that norms follow."""

    def numbers(self, number: int, like: Array) -> list[int]:
        """Return the int32 of each rank."""


class Request(NamedTuple):
    """The options of a call besides unscaling."""

    max_norm: float | None = None
    """The largest 2-norm of all gradients together, to be clipped to."""
    exchange: Exchanging | None = None
    """Over the group whose ranks hold parts of the gradients; None if this rank holds them all."""
    divides: bool = True
    """Whether gradients are divided; if not, the optimizer unscales them by itself if they ``are_scaled``."""
    are_scaled: bool = True
    is_read: bool = False
    """Whether the host reads the verdict at once, so that gradients may be divided and clipped by numbers then."""


UNSCALING = Request()
"""Divide and judge; do not clip."""


class DeferredClip(Protocol):
    """Gradients that are divided and clipped only if the verdict is to step."""

    @property
    def words(self) -> Array:
        """What the host reads, with the verdict: 1-d int32."""

    def judge(self, words: Sequence[int], scale: float) -> tuple[int, float]:
        """Return how many are not finite, or 1 for any number, and the unscaled norm; nothing is modified."""

    def finish(self) -> None:
        """Divide and clip them, after ``judge``."""


class Findings(NamedTuple):
    """The findings of one rank in an optimizer's gradients."""

    nonfinite: Array | int
    """How many are not finite; a 0-d array if the host would have to wait, which may say 1 for any number."""
    norm: Array | float | None = None
    """Their norm before clipping, 0-d float32; a number if the host has it."""
    has_gradients: bool = True
    """Whether there is any."""
    is_scaled: bool = False
    """Whether they were only judged, and are left to the optimizer to unscale."""
    flags: Mapping[Any, Array] | None = None
    """By device whether any is not finite, for frameworks that check it."""
    scale: float | None = None
    """The scale that they were divided by; None if the host would have to wait."""
    divisor: Array | None = None
    """What the optimizer has to divide scaled gradients by to clip them, too; None for the scale."""
    deferred: DeferredClip | None = None
    """What is left to do unless the step is skipped; without a norm the host judges them first, by what it reads."""
    narrow: str = ""
    """The half-precision dtypes in which they were divided, so that small ones are 0 again."""


class Collected(Protocol):
    """An optimizer's gradients during one call of the scaler."""

    is_touched: bool
    """Whether some of them may have been overwritten, so that they cannot be unscaled again."""

    @property
    def like(self) -> Array | None:
        """An array that says where the state belongs; None without any."""

    @property
    def groups(self) -> Sequence[Collectives]:
        """The groups that the gradients themselves are spread over, for a scaler without ``group=``."""

    def unscale(self, current: ScaleView, state: ScaleState) -> Findings:
        """Divide them by the scale of a state, clip and judge them; a refusal modifies none."""


class Gradients:
    """Gradients of arrays of the standard, and how unscaled ones go back to the optimizer."""

    # Arrays of the standard are this process's own.
    groups: Sequence[Collectives] = ()
    __slots__ = ("_assign", "_leaves", "_master_dtype", "_request", "_what", "is_touched")

    def __init__(self, optimizer: Optimizer, request: Request) -> None:
        with _reading:
            if hasattr(optimizer, "param_groups"):
                self._leaves, self._assign = _from_param_groups(cast("OptimizerWithGroups", optimizer))
            else:
                self._leaves, self._assign = _from_grads(optimizer)
        self._what = f"gradient of {type(optimizer).__name__}"
        self._master_dtype = getattr(optimizer, "master_dtype", None) if request.are_scaled else None
        self._request = request
        self.is_touched = False

    @property
    def like(self) -> Array | None:
        """The first floating array, which says where the state belongs."""
        return first_floating(self._leaves)

    def unscale(self, current: ScaleView, state: ScaleState) -> Findings:
        """Divide them by the scale of a state, clip and judge them; no host read but for a norm over ranks."""
        backend = current.state_adapter
        if backend.forbid_tracing is not None:
            backend.forbid_tracing("unscale_()")
        chosen, dtypes = leaves_and_dtypes(self._leaves, current.xp, self._what, takes_integers=False)
        state = UnitState(*state) if current.is_static and current.is_one(state) else state
        dtype, max_norm = self._master_dtype, self._request.max_norm
        is_divided, keeps_dtype = not isinstance(state, UnitState), dtype is None
        narrow = _narrow_dtypes(dtypes, current.xp) if keeps_dtype and is_divided else ""
        out, norm = chosen if keeps_dtype else None, None
        self.is_touched = True
        try:
            if max_norm is None:
                unscaled, nonfinite = backend.unscale(chosen, state, dtype=dtype, out=out)
            else:
                unscaled, nonfinite, squares = backend.unscale_with_squares(chosen, state, dtype=dtype, out=out)
        except (InvalidTypeError, InvalidValueError):
            self.is_touched = False
            raise
        if max_norm is not None:
            unscaled, nonfinite, norm = self._clip(backend, unscaled, nonfinite, squares, max_norm)
        count, scale = backend.peek((nonfinite, state.scale)) or (nonfinite, None)
        if is_divided or norm is not None or not keeps_dtype:
            self._assign({} if unscaled is chosen else dict(zip(map(id, chosen), unscaled, strict=True)))
        return Findings(count, norm, len(chosen) > 0, scale=scale, narrow=narrow)

    def _clip(
        self, backend: Backend, arrays: Sequence[Array], nonfinite: Array, squares: Array, max_norm: float
    ) -> tuple[Sequence[Array], Array, Array]:
        """Clip unscaled arrays; return them, the count (1 if the norm of finite ones overflows) and the norm before."""
        exchange = self._request.exchange
        norm, factor, overflows = backend.clip_factor(squares, max_norm)
        if exchange is not None:
            # The CPU computes the same norm of all ranks' parts on every rank.
            (number,) = backend.read(array_namespace(norm).reshape(norm_bits(backend, norm), (1,)))
            norms = [validation.float32_from_bits(bits) for bits in exchange.numbers(number, norm)]
            norm, factor, overflows = clip_factor_of(math.hypot(*norms), max_norm, norm, overflows)
            if math.isfinite(norms[exchange.rank]) and not all(map(math.isfinite, norms)):
                # The ranks whose own norm is not finite report it.
                overflows = array_namespace(overflows).zeros_like(overflows)
        xp = array_namespace(nonfinite)
        return backend.multiply_in_place(arrays, factor), as_0d_array(xp, xp.maximum(nonfinite, overflows)), norm


@functools.lru_cache
def _narrow_dtypes(dtypes: frozenset[object], xp: Namespace) -> str:
    """Return the names of the half-precision ones of some dtypes; bfloat16 has the range of float32."""
    halves = {str(one) for one in dtypes if dtype_kind(one, xp) is Kind.HALF}
    return ", ".join(sorted(name for name in halves if "bfloat16" not in name))


@dataclasses.dataclass(slots=True)
class UserNorm:
    """A norm in place of an optimizer's gradients, which are not read: the program has clipped them by it."""

    norm: Array | float
    """A number, or 0-d float32 if the host would have to wait for it."""
    fallback: Callable[[], Array | None]
    """Returns an array that says where the state belongs, if the norm is a number."""
    groups: Sequence[Collectives]
    is_read: bool
    """Whether the host reads the verdict at once."""
    is_touched: bool = False

    @property
    def like(self) -> Array | None:
        """The norm, or if that is a number an array of the optimizer."""
        return self.norm if is_array_api_obj(self.norm) else self.fallback()

    def unscale(self, current: ScaleView, state: ScaleState) -> Findings:
        """Judge the norm; if the host reads the verdict, with that."""
        norm, backend = self.norm, current.state_adapter
        if not is_array_api_obj(norm):
            (scale,) = backend.peek((state.scale,)) or (None,)
            return Findings(*_judged_norm(norm), scale=scale)
        norm = backend.move(norm, state.scale)
        bits = backend.bits(norm) if self.is_read else None
        if bits is not None:
            return Findings(0, deferred=NormToRead(bits))
        xp = array_namespace(norm)
        norm = as_0d_array(xp, xp.where(norm < 0.0, xp.full_like(norm, math.inf), norm))
        return Findings(nonfinite_flag(norm, device(state.scale)), norm)


def _judged_norm(norm: float) -> tuple[int, float]:
    """Return 1 if a norm is not finite, else 0, and the norm; DeepSpeed gives -1 for one that is not."""
    return (1, math.inf) if norm < 0.0 else (int(not math.isfinite(norm)), norm)


class NormToRead(NamedTuple):
    """A norm that the host reads with the verdict, in place of gradients that are divided then."""

    words: Array
    """Its bits."""

    def judge(self, words: Sequence[int], scale: float) -> tuple[int, float]:  # noqa: ARG002
        """Return 1 if it is not finite, else 0, and the norm."""
        return _judged_norm(validation.float32_from_bits(words[0]))

    def finish(self) -> None:
        """Leave the gradients to the program."""


def norm_bits(backend: Backend, norm: Array) -> Array:
    """Return the bits of a norm, 0-d int32: those of infinity if it is not finite, 0 below the normal numbers."""
    xp = array_namespace(norm)
    is_normal = xp.logical_and(xp.isfinite(norm), norm >= xp.full_like(norm, validation.SMALLEST_NORMAL))
    normal = as_0d_array(xp, xp.where(is_normal, norm, xp.full_like(norm, 1.0)))
    bits = backend.bits(normal)
    bits = float32_bits(normal) if bits is None else bits
    infinite = xp.where(xp.isfinite(norm), xp.zeros_like(bits), xp.full_like(bits, _INFINITY_BITS))
    return as_0d_array(xp, xp.where(is_normal, bits, infinite))


def parameter_lists(optimizer: OptimizerWithGroups) -> list[tuple[Mapping[str, Any], list[Any]]]:
    """Return the groups of an optimizer, each with its parameters; InvalidTypeError for groups of another form."""
    lists = []
    groups, kind = optimizer.param_groups, type(optimizer).__name__
    if not _can_be_walked(groups):
        raise validation.wrong_type(groups, f"param_groups of {kind}", "a list of dicts with 'params'")
    for index, group in enumerate(groups):
        try:
            params = group["params"]
        except Exception:
            name = f"param_groups[{index}] of {kind}"
            raise validation.wrong_type(group, name, "a dict with 'params'") from None
        if hasattr(params, "grad"):
            params = [params]
        if not _can_be_walked(params):
            name = f"param_groups[{index}]['params'] of {kind}"
            raise validation.wrong_type(params, name, "a list of parameters with .grad")
        lists.append((group, list(params)))
    return lists


def _can_be_walked(x: object) -> TypeGuard[Iterable[Any]]:
    # An iterator would be empty for the optimizer after the scaler has walked it.
    # To ask for the abstract classes takes long.
    return isinstance(x, (list, tuple)) or (isinstance(x, Iterable) and not isinstance(x, (str, bytes, Iterator)))


def _gradients_of(optimizer: object, parameters: Iterable[Any]) -> list[Array]:
    try:
        # Each gradient is read once: a parameter may give a new object at each access.
        return [parameter.grad for parameter in parameters]
    except AttributeError:
        bad = [parameter for parameter in parameters if not hasattr(parameter, "grad")]
        msg = (
            f"a parameter of {type(optimizer).__name__} must have .grad, got "
            f"{short_repr(bad[0]) if bad else 'an error'}"
        )
        raise InvalidTypeError(msg) from None


def _from_param_groups(optimizer: OptimizerWithGroups) -> tuple[list[Array], _Assign]:
    """Return an optimizer's gradients, and a function that assigns new ones by the ``id`` of the old."""
    parameters = [one for _, params in parameter_lists(optimizer) for one in params]
    gradients = _gradients_of(optimizer, parameters)

    def assign(replacements: dict[int, Array]) -> None:
        wanted = [replacements.get(id(old), old) for old in gradients] if replacements else gradients
        # A property that returns copies gives other objects than before.
        if not all(map(operator.is_, wanted, [parameter.grad for parameter in parameters])):
            with _assigning(f"grad of {type(parameters[0]).__name__}"):
                for parameter, new in zip(parameters, wanted, strict=True):
                    if new is not None:
                        parameter.grad = new

    return [gradient for gradient in gradients if gradient is not None], assign


@contextlib.contextmanager
def _assigning(what: str) -> Iterator[None]:
    try:
        yield
    except AttributeError as error:
        msg = (
            f"{what} must be assignable, to take new arrays (those of a master_dtype, or in place of arrays that "
            f"cannot be written or are made when they are read), got {error}: give it a setter"
        )
        raise InvalidTypeError(msg) from error


def no_optimizer(got: object, members: str) -> InvalidTypeError:
    """Return the error for an object that lacks the members of an optimizer, or a class in place of an instance."""
    if isinstance(got, type):
        return InvalidTypeError(
            f"an optimizer must be an instance, got {short_repr(got)}: call it, {got.__name__}(...)"
        )
    text = f"{short_repr(got)} of type {type(got).__name__}"
    if callable(got):
        # The whole of a model is long.
        text = f"a {type(got).__name__}, a model or a function: pass the optimizer"
    if isinstance(got, (list, tuple, dict, set, frozenset)):
        text = f"a {type(got).__name__} of {len(got)}: make this call for each optimizer"
    return InvalidTypeError(f"an optimizer must have {members}, got {text}")


def _require_tree(optimizer: OptimizerWithGrads) -> object:
    """Return the ``grads`` of an optimizer without ``param_groups``, if there are any that can be walked."""
    if not hasattr(optimizer, "grads"):
        members = "param_groups (a list of dicts whose 'params' have .grad) or grads (arrays in nested containers)"
        raise no_optimizer(optimizer, members)
    gradients = optimizer.grads
    if isinstance(gradients, (list, tuple, dict)) or is_array_api_obj(gradients):
        return gradients
    if isinstance(gradients, (str, bytes, Iterator)) or callable(gradients):
        raise validation.wrong_type(gradients, f"grads of {type(optimizer).__name__}", "arrays in nested containers")
    return gradients


def _from_grads(optimizer: OptimizerWithGrads) -> tuple[list[Array], _Assign]:
    gradients = _require_tree(optimizer)
    leaves, rebuild = tree.flatten(gradients)

    def assign(replacements: dict[int, Array]) -> None:
        new = [replacements.get(id(leaf), leaf) for leaf in leaves] if replacements else leaves
        # A property may build a new container of the same arrays; other arrays are copies.
        old = leaves if optimizer.grads is gradients else tree.flatten(optimizer.grads)[0]
        if old is not new and (len(old) != len(new) or not all(map(operator.is_, old, new))):
            with _assigning(f"grads of {type(optimizer).__name__}"):
                optimizer.grads = rebuild(new)

    return leaves, assign


class NamedGradient(NamedTuple):
    """A parameter's gradient, or None, under its name in torch's ``param_names``, or the expression that reaches it."""

    name: str
    array: Array
    parameter: object = None
    """None in a ``grads`` tree."""


@reading("an optimizer")
def named_gradients(optimizer: Optimizer) -> list[NamedGradient]:
    """Return an optimizer's gradients with their names: one for each parameter, in order, gradient or not."""
    if not hasattr(optimizer, "param_groups"):
        return [NamedGradient(*one) for one in tree.leaves_with_paths(_require_tree(optimizer))]
    parameters: dict[int, tuple[str, object]] = {}
    for index, (group, params) in enumerate(parameter_lists(cast("OptimizerWithGroups", optimizer))):
        paths = [f"param_groups[{index}]['params'][{place}]" for place in range(len(params))]
        names = group.get("param_names") if hasattr(group, "get") else None
        names = paths if names is None or len(names) != len(params) else names
        for name, parameter in zip(names, params, strict=True):
            parameters.setdefault(id(parameter), (str(name), parameter))
    gradients = _gradients_of(optimizer, [parameter for _, parameter in parameters.values()])
    pairs = zip(parameters.values(), gradients, strict=True)
    return [NamedGradient(name, gradient, parameter) for (name, parameter), gradient in pairs]


def values_of_gradients(backend: Backend, optimizer: Optimizer) -> list[Array]:
    """Return the floating arrays that hold an optimizer's gradients on this rank."""
    arrays = [one.array for one in named_gradients(optimizer) if is_array_api_obj(one.array)]
    return [one for one in map(backend.values_of, arrays) if one is not None and is_floating(one)]
