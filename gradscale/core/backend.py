"""Backend: the pure functions and the hooks of a scaler, of which an adapter overrides what its library does better."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from array_api_compat import array_namespace, to_device

from gradscale.core import arithmetic, summaries, tree
from gradscale.core.arithmetic import device, device_kwargs
from gradscale.core.gradients import Collected, Gradients, Request
from gradscale.core.protocols import Array, Collectives, Namespace, Optimizer, Policy, ScaleState
from gradscale.core.snapshot import ArraySnapshot, Snapshot
from gradscale.core.tree import first_floating, floating_leaves, require_arrays
from gradscale.core.validation import wrong_type
from gradscale.errors import BackendNotAvailableError, InvalidTypeError, short_repr

_Numbers = Sequence[float | None]
_State = TypeVar("_State", bound=tuple[Any, ...])
_Multiply = Callable[[Sequence[Array]], Sequence[Array]]

UNKNOWN: _Numbers = (None,) * len(ScaleState._fields)
"""The numbers of a state that the host does not know."""


class HostRead(Protocol):
    """A 1-d int32 array on its way to the host."""

    is_replayed: bool
    """Whether a captured graph writes it at each replay."""

    def is_done(self) -> bool:
        """Tell whether the host has it; no wait."""

    def __call__(self) -> list[int]:
        """Return the values; waits for the device."""


class Backend:
    """The adapter of an array library: the pure functions, of which a subclass overrides what its library does faster.

    As it is, it serves every library that follows the array API standard. A subclass needs a ``name`` and ``example``;
    an instance is registered in the entry-point group ``gradscale.backends`` under the top-level module of the array
    type. Hold it to :func:`gradscale.testing.check_backend`: a pure function that is overridden gives the same bits.
    Only ``read``, ``read_summaries``, ``peek`` and the call of a ``HostRead`` bring values to the host.

    Attributes
    ----------
    name : str
        The entry point's name.
    is_shared : bool
        Whether others may write to the arrays of a scaler's state, which therefore stay the same ones.
    takes_numbers : bool
        Whether a state whose numbers the host has is adapted by the policy's rule for numbers.
    is_replayed : bool
        Whether a captured graph scales or adapts the state, so that the host does not see what happens.
    forbid_tracing : callable, optional
        Called with the name of a call of a scaler; raises in a function that is compiled or captured, in which the
        scale would become a constant. None, which no ``super()`` calls, if nothing is forbidden.
    stepping : callable, optional
        Called with a ``Step``; returns a context for the step if the optimizer skips by itself, else None. None if no
        optimizer of the library does.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> class MyBackend(gradscale.Backend):
    ...     name = "mylibrary"
    ...     def example(self):
    ...         return np.zeros((), np.float32)
    >>> state = gradscale.DynamicScale(init_scale=4.0).init(like=np.float32(0.0))
    >>> MyBackend().unscale([np.float32([2.0, np.inf])], state)
    ([array([0.5, inf], dtype=float32)], array(1, dtype=int32))
    """

    name: str = "generic"
    is_shared: bool = False
    takes_numbers: bool = True
    is_replayed: bool = False
    forbid_tracing: Callable[[str], None] | None = None
    stepping: Callable[[Any], contextlib.AbstractContextManager[None] | None] | None = None

    def read(self, x: Array, /) -> list[int]:
        """Return a 1-d int32 array as Python ints: the one place where the host waits for the device."""
        # The standard converts 0-d arrays alone; for each a lazy library (dask, cubed) would compute everything.
        if hasattr(x, "compute"):
            x = x.compute()
        if hasattr(x, "tolist"):
            return list(map(int, x.tolist()))
        return [int(x[index]) for index in range(x.shape[0])]

    def peek(self, arrays: Sequence[Array], /) -> list[Any] | None:  # noqa: ARG002
        """Return the numbers in 0-d arrays of one device; None if the host would have to wait, and by default."""
        return None

    def start_read(self, x: Array, /) -> HostRead:
        """Begin a ``read`` of a verdict that ``stepping`` leaves for later, without making the host wait."""
        raise NotImplementedError

    def placement(self, like: Array, /) -> object:
        """Return the ``device=`` of a 0-d array that is to be combined with ``like``; None if any will do."""
        return device(like)

    def integers(self, values: Sequence[int], like: Array, /) -> Array:
        """Return Python ints as a 1-d int32 array on the device of another; without a wait if the library can."""
        xp = array_namespace(like)
        return xp.asarray(values, dtype=xp.int32, **device_kwargs(self.placement(like)))

    def move(self, x: Array, like: Array, /) -> Array:
        """Return a 0-d array on the device of another one, in the order of the devices' streams. No host read."""
        where = self.placement(like)
        # Some libraries, such as ndonnx, move nothing, and refuse even to stay.
        return x if device(x) == where else to_device(x, where)

    def example(self) -> Array:
        """Return a 0-d float32 array on the default device, for a rank without arrays of its own.

        BackendNotAvailableError unless a subclass overrides it.
        """
        msg = f"backend= must name a library's adapter for a rank that has no arrays, got the {self.name} one"
        raise BackendNotAvailableError(msg)

    def bits(self, x: Array, /) -> Array | None:  # noqa: ARG002
        """Return the IEEE bits of a real floating array as signed integers of its width; no host read.

        None if the library has no bit cast for the dtype, and by default: arithmetic then takes the bits apart, which
        is slower, and as exact as the library's compiler lets it be. Called for float16, bfloat16, float32 and float64.
        """
        return None

    def fingerprint(self, state: ScaleState, /) -> Array:
        """Return a state as a 1-d int32 array: the IEEE bits of the scale, then each tracker. No host read."""
        return arithmetic.fingerprint(state, self.bits(state.scale))

    def update(self, policy: Policy, state: ScaleState, nonfinite: Array, /) -> ScaleState:
        """Return the state after a step, as the policy's ``update`` does. No host read."""
        return policy.update(state, nonfinite=nonfinite)

    def scale(self, outputs: Sequence[Array], state: ScaleState, /) -> list[Array]:
        """Multiply floating arrays by the scale: new ones of their dtypes, but float32 for 0-d half precision."""
        factors = arithmetic.replicas(state.scale, self.placement, self.move)
        return [arithmetic.scaled(x, factors(x)) for x in outputs]

    def unscale(
        self, grads: Sequence[Array], state: ScaleState, /, *, dtype: Any = None, out: Sequence[Array] | None = None
    ) -> tuple[Sequence[Array], Array]:
        """Divide floating arrays by the scale and count those that are not finite afterwards.

        Parameters
        ----------
        grads : sequence of arrays
            Floating or complex arrays of the library, each once. A complex value that is not finite need not keep its
            parts.
        state : ScaleState
            Gives the scale. Of a ``gradscale.core.arithmetic.UnitState`` it is 1: the library may leave arrays
            that have the wanted dtype as they are, and judge them alone.
        dtype : dtype, optional
            Wanted dtype of the real ones, as new arrays. Default: each one's own.
        out : sequence of arrays, optional
            Instead of ``dtype``: an array to write to for each gradient, perhaps the gradient itself. By default, and
            if the library cannot write, new arrays of these dtypes come back.

        Returns
        -------
        arrays : sequence of arrays
            ``out``, or new ones.
        nonfinite : array
            0-d int32. A kernel that judges many arrays at once may understate it, but never to 0. No host read.
        """
        return arithmetic.unscale_arrays(grads, state, dtype=dtype, out=out)

    def unscale_with_squares(
        self, grads: Sequence[Array], state: ScaleState, /, *, dtype: Any = None, out: Sequence[Array] | None = None
    ) -> tuple[Sequence[Array], Array, Array]:
        """Unscale as ``unscale``, and return the sum of the squares, too: 0-d float64 or float32 beside the state."""
        unscaled, nonfinite = self.unscale(grads, state, dtype=dtype, out=out)
        return unscaled, nonfinite, self.sum_of_squares(unscaled, state.scale)

    def sum_of_squares(self, arrays: Sequence[Array], like: Array, /) -> Array:
        """Return the sum of the squares of all elements, 0-d float64 or float32 beside another array. No host read."""
        return arithmetic.sum_of_squares(arrays, like)

    def clip_factor(self, squares: Array, max_norm: float, /) -> tuple[Array, Array, Array]:
        """Return norm, factor and overflow, as ``gradscale.core.arithmetic.clip_factor`` does. No host read."""
        return arithmetic.clip_factor(squares, max_norm)

    def multiply_in_place(self, arrays: Sequence[Array], factor: Array, /) -> Sequence[Array]:
        """Multiply ``unscale``'s arrays by a 0-d float32 of at most 1, rounded once; in place if the library can."""
        return arithmetic.multiply_arrays(arrays, factor)

    def summarize(self, arrays: Sequence[Array], /) -> Array:
        """Summarize at least one floating array, as ``gradscale.core.summaries.summarize_arrays`` does."""
        return summaries.summarize_arrays(arrays, self.bits)

    def read_summaries(
        self, arrays: Sequence[Array], others: Sequence[Array] = ()
    ) -> tuple[list[summaries.Summary], list[list[int]]]:
        """Summarize arrays, and read the summaries and ``others`` (1-d int32) in one host read for each device."""
        vectors = ([self.summarize(arrays)] if arrays else []) + list(others)
        if vectors and all(self.placement(vector) == self.placement(vectors[0]) for vector in vectors):
            together = iter(self.read(array_namespace(vectors[0]).concat(vectors)))
            values = [[next(together) for _ in range(vector.shape[0])] for vector in vectors]
        else:
            values = [self.read(vector) for vector in vectors]
        words = values.pop(0) if arrays else []
        return summaries.summaries_of(arrays, words), values

    # The hooks of a scaler: what a library or its own scalers do in another way than plain arrays.

    def first_state(self, policy: Policy, numbers: Mapping[str, float], like: Array) -> ScaleState:
        """Return a policy's first state beside an array, with some fields set to numbers."""
        require_values(like)
        return self.with_numbers(policy.init(like), [numbers.get(name) for name in ScaleState._fields])

    def with_numbers(self, state: ScaleState, numbers: _Numbers, before: _Numbers = UNKNOWN) -> ScaleState:
        """Return a state with its fields replaced by numbers, but where they are equal to those of before, or None.

        Perhaps in the same arrays.
        """
        xp, fields = array_namespace(state.scale), []
        for x, number, old in zip(state, numbers, before, strict=True):
            on = device_kwargs(self.placement(x))
            fields.append(x if number == old else xp.asarray(number, dtype=x.dtype, **on))
        return ScaleState(*fields)

    def adapt(
        self,
        policy: Policy,
        state: ScaleState,
        nonfinite: Array | int,
        keeps_scale: Array | None,
        least: float = 0.0,  # noqa: ARG002
    ) -> ScaleState:
        """Return the state after a step, perhaps in the same arrays; no host read.

        It stays as it is if ``keeps_scale``, 0-d, is true. Backoffs alone lower the scale no further than to ``least``,
        as far as the host knows.
        """
        xp = array_namespace(state.scale)
        if isinstance(nonfinite, int):
            nonfinite = xp.asarray(nonfinite, dtype=xp.int32, **device_kwargs(self.placement(state.scale)))
        new = self.update(policy, state, nonfinite)
        return new if keeps_scale is None else ScaleState._make(map(xp.where, [keeps_scale] * len(new), state, new))

    def write_into(self, old: _State, new: _State) -> _State:  # noqa: ARG002
        """Return a state that takes the place of another, perhaps in the other's arrays."""
        return new

    def map_outputs(self, outputs: object, namespace_for: Callable[[Array], Namespace], multiply: _Multiply) -> Any:
        """Return the outputs of ``scale``, with all floating arrays multiplied at once.

        ``namespace_for`` makes the state beside an array, if there is none, and returns the state's namespace.
        """
        if isinstance(outputs, int):
            advice = f"; wrap it, such as np.float32({short_repr(outputs)})"
            raise wrong_type(outputs, "outputs", "an array or nested containers of arrays", advice)
        leaves, rebuild = tree.flatten(outputs)
        like = first_floating(leaves)
        if like is None:
            require_arrays(leaves, what="output", rebuild=rebuild)
            return rebuild(leaves)
        chosen = floating_leaves(leaves, namespace_for(like), what="output", rebuild=rebuild)
        by_identity = {id(old): new for old, new in zip(chosen, multiply(chosen), strict=True)}
        return rebuild(by_identity.get(id(leaf), leaf) for leaf in leaves)

    # Returns an optimizer's gradients; nothing is modified.
    collect: Callable[[Any, Request], Collected] = Gradients

    # Returns copies of the arrays, or modules, of the library that the option ``hold`` names.
    snapshot: Callable[[Sequence[Any]], Snapshot] = ArraySnapshot

    def was_left_scaled(self, optimizer: object) -> bool:  # noqa: ARG002
        """Tell whether an optimizer's last step was left to unscale its gradients by itself."""
        return False

    def groups_of(self, optimizer: Optimizer) -> Sequence[Collectives]:  # noqa: ARG002
        """Return the groups that an optimizer's parameters themselves are spread over."""
        return ()

    def norm_groups(self, optimizer: Optimizer) -> Sequence[Collectives]:  # noqa: ARG002
        """Return the groups that an optimizer's gradients themselves say their norm is taken over."""
        return ()

    def reads_verdict(self, optimizer: Optimizer) -> bool:  # noqa: ARG002
        """Tell whether the host reads the verdict in each step of an optimizer if this process decides alone."""
        return True

    def values_of(self, x: Array) -> Array | None:
        """Return the array that holds an array's values on this rank; None if it has none."""
        return x

    def places_of(self, x: Array) -> Array | None:  # noqa: ARG002
        """Return as floats at which indices a sparse array has its values; None for a dense one."""
        return None

    def shape_of(self, x: Array) -> tuple[int, ...]:
        """Return the shape of an array on this rank."""
        return tuple(x.shape)


def require_values(like: Array | None) -> None:
    """Raise InvalidTypeError for a tensor on torch's meta device, where a state would have no values."""
    if getattr(getattr(like, "device", None), "type", None) == "meta":
        msg = (
            f"the state cannot be made beside a tensor without values, got {short_repr(like)}: materialize the model, "
            f"and scale its loss on a device that computes"
        )
        raise InvalidTypeError(msg)
