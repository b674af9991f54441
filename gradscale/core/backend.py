"""Backend: the pure functions, of which an array library's adapter overrides those that its library does faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from array_api_compat import array_namespace, device, to_device

from gradscale.core import arithmetic, summaries
from gradscale.core import arithmetic as clipping
from gradscale.core.protocols import Array, Policy, ScaleState
from gradscale.errors import BackendNotAvailableError

__all__ = ["Backend", "DoneRead", "HostRead"]


class HostRead(Protocol):
    """A 1-d int32 array on its way to the host."""

    def is_done(self) -> bool:
        """Tell whether the host has it; no wait."""

    def __call__(self) -> list[int]:
        """Return the values; waits for the device."""


class Backend:
    """The adapter of an array library: the pure functions, of which a subclass overrides what its library does faster.

    As it is, it serves every library that follows the array API standard. A subclass needs a ``name`` and ``example``;
    an instance is registered in the entry-point group ``gradscale.backends`` under the top-level module of the array
    type. Hold it to :func:`gradscale.testing.check_backend`: whatever is overridden gives the same bits.

    Attributes
    ----------
    name : str
        The entry point's name.
    computes_on_host : bool
        Whether arrays are the host's, which computes with them at once. Then a state may be one of Python numbers,
        which a policy updates in a fraction of the time: ``scale`` takes it, and ``unscale`` and
        ``unscale_with_squares``, which return the count as an int for it.

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
    computes_on_host: bool = False

    def read(self, x: Array, /) -> list[int]:
        """Return a 1-d int32 array as Python ints: the one place where the host waits for the device.

        The standard converts only 0-d arrays, for each of which a lazy library (dask, cubed) would compute everything.
        So ``compute`` and ``tolist`` are used if there are any.
        """
        if hasattr(x, "compute"):
            x = x.compute()
        if hasattr(x, "tolist"):
            return [int(value) for value in x.tolist()]
        return [int(x[index]) for index in range(x.shape[0])]

    def start_read(self, x: Array, /) -> HostRead:
        """Begin what ``read`` does, without making the host wait if the library can; by default it waits here."""
        return DoneRead(self.read(x))

    def placement(self, like: Array, /) -> object:
        """Return the ``device=`` of a 0-d array that is to be combined with ``like``; None if any will do."""
        return device(like)

    def integers(self, values: Sequence[int], like: Array, /) -> Array:
        """Return Python ints as a 1-d int32 array on the device of another; without a wait if the library can."""
        xp = array_namespace(like)
        return xp.asarray(values, dtype=xp.int32, device=self.placement(like))

    def move(self, x: Array, like: Array, /) -> Array:
        """Return a 0-d array on the device of another one, in the order of the devices' streams. No host read."""
        return to_device(x, self.placement(like))

    def example(self) -> Array:
        """Return a 0-d float32 array on the default device, for a rank that has no arrays of its own.

        Raises
        ------
        BackendNotAvailableError
            Unless it is overridden: without a library named there is no array to make.
        """
        msg = f"backend= must name a library's adapter for a rank that has no arrays, got the {self.name} one"
        raise BackendNotAvailableError(msg)

    def refuse_tracing(self, what: str, /) -> None:
        """Raise in a function that is compiled or captured, in which the scale of a scaler would become a constant.

        ``what`` was called, for the message. By default nothing is refused.
        """

    def bits(self, x: Array, /) -> Array | None:  # noqa: ARG002
        """Return the IEEE bits of a real floating array as signed integers of its width; no host read.

        None if the library has no bit cast for the dtype, and by default: arithmetic then takes the bits apart, which
        is slower, and as exact as the library's compiler lets it be. Asked for float16, bfloat16, float32 and float64.
        """
        return None

    def fingerprint(self, state: ScaleState, /) -> Array:
        """Return a state as a 1-d int32 array: the IEEE bits of the scale, then each tracker. No host read."""
        return arithmetic.fingerprint(state, self.bits(state.scale))

    def update(self, policy: Policy, state: ScaleState, nonfinite: Array, /) -> ScaleState:
        """Return the state after a step, as the policy's ``update`` does. No host read."""
        return policy.update(state, nonfinite=nonfinite)

    def pack(
        self,
        policy: Policy,
        state: ScaleState,
        nonfinite: Array,
        about: Sequence[int],
        /,
        *,
        has_gradients: bool = True,
        code: Array | int = 0,
    ) -> Array:
        """Return the vector of a state that ranks agree on, as ``gradscale.core.vector`` has it. No host read.

        Parameters
        ----------
        policy, state, nonfinite : Policy, ScaleState, array
            This rank's; the count is 0-d int32.
        about : sequence of int
            The policy's number, and the position of the message.
        has_gradients, code : bool, array or int
            What else this rank has found; an array is 0-d int32.

        Returns
        -------
        array
            1-d int32.
        """
        xp = array_namespace(state.scale)
        at_min_scale = policy.at_min_scale(state)
        flags = [xp.reshape(nonfinite, (1,))]
        if at_min_scale is None:
            known = [0, has_gradients]
        else:
            flags.append(xp.reshape(xp.astype(at_min_scale, xp.int32), (1,)))
            known = [has_gradients]
        if isinstance(code, int):
            flags.append(self.integers([*known, code], state.scale))
        else:
            flags += [self.integers(known, state.scale), xp.reshape(code, (1,))]
        fields = xp.concat([self.fingerprint(state), self.integers(about, state.scale)])
        return xp.concat([*flags, fields, -fields])

    def scale(self, outputs: Sequence[Array], state: ScaleState, /) -> list[Array]:
        """Multiply floating arrays by the scale.

        The new ones have the same dtypes, but float32 for a 0-d one of half precision. No host read.
        """
        factors = arithmetic.DeviceReplicas(state.scale, self.placement, self.move)
        return [arithmetic.scaled(x, factors.on(x)) for x in outputs]

    def unscale(
        self, grads: Sequence[Array], state: ScaleState, /, *, dtype: Any = None, out: Sequence[Array] | None = None
    ) -> tuple[Sequence[Array], Array | int]:
        """Divide floating arrays by the scale and count those that are not finite afterwards.

        Parameters
        ----------
        grads : sequence of arrays
            Floating or complex arrays of the library, each once. A complex value that is not finite need not keep its
            parts.
        state : ScaleState
            Gives the scale.
        dtype : dtype, optional
            Wanted dtype of the real ones, as new arrays. Default: each one's own.
        out : sequence of arrays, optional
            Instead of ``dtype``: an array to write to for each gradient, perhaps the gradient itself. By default, and
            if the library cannot write, new arrays of these dtypes come back.

        Returns
        -------
        arrays : sequence of arrays
            ``out``, or new ones.
        nonfinite : array or int
            0-d int32; an int for a state of numbers. A kernel that judges many arrays at once may understate it, but
            never to 0. No host read.
        """
        return arithmetic.unscale_arrays(grads, state, dtype=dtype, out=out)

    def unscale_with_squares(
        self, grads: Sequence[Array], state: ScaleState, /, *, dtype: Any = None, out: Sequence[Array] | None = None
    ) -> tuple[Sequence[Array], Array | int, Array]:
        """Do what ``unscale`` does, and also return the sum of the squares of all unscaled elements.

        It is 0-d float64 on the state's device, or float32 if there is no float64. No host read.
        """
        unscaled, nonfinite = self.unscale(grads, state, dtype=dtype, out=out)
        return unscaled, nonfinite, arithmetic.sum_of_squares(unscaled, state.scale)

    def clip_factor(self, squares: Array, max_norm: float, /) -> tuple[Array, Array, Array]:
        """Return norm, factor and overflow, as ``gradscale.core.clipping.clip_factor`` does. No host read."""
        return clipping.clip_factor(squares, max_norm)

    def multiply_in_place(self, arrays: Sequence[Array], factor: Array, /) -> Sequence[Array]:
        """Multiply arrays that ``unscale`` has returned by a 0-d float32 of at most 1, rounded once to their dtypes.

        It returns the same arrays if the library can write them, and new ones by default. No host read.
        """
        return arithmetic.multiply_arrays(arrays, factor)

    def summarize(self, arrays: Sequence[Array], /) -> Array:
        """Summarize at least one floating array, as ``gradscale.core.summaries.summarize_arrays`` does."""
        return summaries.summarize_arrays(arrays, self.bits)

    def read_summaries(
        self, arrays: Sequence[Array], others: Sequence[Array] = ()
    ) -> tuple[list[summaries.Summary], list[list[int]]]:
        """Summarize arrays, or none, and read the summaries and other arrays, 1-d int32, in one host read.

        If not all of them are on one device, each costs a read of its own.
        """
        vectors = ([self.summarize(arrays)] if arrays else []) + list(others)
        lengths = [vector.shape[0] for vector in vectors]
        values: list[list[int]] = []
        if vectors and all(self.placement(vector) == self.placement(vectors[0]) for vector in vectors):
            together = iter(self.read(array_namespace(vectors[0]).concat(vectors)))
            values = [[next(together) for _ in range(length)] for length in lengths]
        else:
            values = [self.read(vector) for vector in vectors]
        found = values.pop(0) if arrays else []
        return summaries.summaries_of(arrays, found), values


class DoneRead:
    """Values that the host has already."""

    def __init__(self, values: list[int]) -> None:
        self._values = values

    def is_done(self) -> bool:
        """Return True."""
        return True

    def __call__(self) -> list[int]:
        """Return the values."""
        return self._values
