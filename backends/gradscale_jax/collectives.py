"""Agreement over named axes, inside a compiled step: one pmax of int32 over the ranks of shard_map, vmap or pmap."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gradscale import ScaleState, registry
from gradscale.core import validation
from gradscale.core.messages import shown
from gradscale.core.protocols import Policy
from gradscale.core.vector import LENGTH, Purpose, identify, pack, position
from gradscale.errors import CallOrderError, InvalidTypeError, InvalidValueError
from gradscale_jax import trees
from gradscale_jax.verdict import Verdict

__all__ = ["AxisCollectives", "agree"]

_FIELDS = (LENGTH - 2) // 2
# A verdict keeps so many; the others are the same in every step of a compiled program.
_KEPT = 7


class AxisCollectives:
    """MAX all-reduces over one or several named axes, for use inside the function that they are mapped over.

    A :class:`gradscale.core.protocols.Collectives` whose vector stays on the device. A ``ShardedGradScaler`` cannot use
    it: it reads its verdict on the host, where no axis is bound.

    Parameters
    ----------
    axis_name : str or tuple of str
        As ``jax.shard_map``, ``jax.vmap(axis_name=)`` or a mesh names them; several are one group. CallOrderError if
        one is not bound here, InvalidTypeError for anything but names.

    Attributes
    ----------
    rank : array
        0-d int32: position in the group; traced.
    size : int
        Number of ranks.

    Examples
    --------
    >>> import gradscale_jax, jax, jax.numpy as jnp
    >>> def largest(x):
    ...     return gradscale_jax.AxisCollectives("data").start_max(x)()
    >>> print(jax.vmap(largest, axis_name="data")(jnp.asarray([[1, 7], [3, 5]])))
    [[3 7]
     [3 7]]
    """

    def __init__(self, axis_name: Hashable | Sequence[Hashable]) -> None:
        names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
        if not names or not all(isinstance(name, Hashable) and name is not None for name in names):
            msg = f"axis_name must be the name of a mapped axis, or a tuple of names, got {shown(axis_name)}"
            raise InvalidTypeError(msg)
        try:
            self.size: int = lax.axis_size(names)
        except NameError as error:
            msg = (
                f"axis_name {axis_name!r} is not bound here ({error}): call inside the function that jax.shard_map, "
                f"jax.vmap(axis_name=...) or jax.pmap maps over it, or leave axis_name out"
            )
            raise CallOrderError(msg) from error
        self._names = names

    @property
    def rank(self) -> jax.Array:
        """0-d int32: position in the group; traced."""
        return lax.axis_index(self._names)

    def start_max(self, x: jax.Array, /) -> Callable[[], jax.Array]:
        """Make an element-wise MAX all-reduce of a 1-d int32 array, when the compiler likes; the call returns it."""
        if x.ndim != 1 or x.dtype != jnp.int32:
            msg = f"only 1-d int32 arrays are reduced, got {x.ndim}-d {x.dtype}"
            raise InvalidValueError(msg)
        reduced = lax.pmax(x, self._names)
        return lambda: reduced


def agree(
    nonfinite: jax.Array, state: ScaleState, policy: Policy, axis_name: Hashable | Sequence[Hashable] | None = None
) -> Verdict:
    """Return one verdict for all ranks of named axes, and whether they hold one state; traceable, no host read.

    Parameters
    ----------
    nonfinite : array
        0-d int32: the count of this rank, as ``unscale`` returns it.
    state : ScaleState
        The state that this rank's loss was scaled with.
    policy : Policy
        The same on every rank. The compiler cannot raise its errors: ``verdict.check(policy)`` does, on the host.
    axis_name : str or tuple of str, optional
        Axes to agree over, in one ``pmax`` of 22 int32; CallOrderError if one is not bound. Default: none, the verdict
        of this rank alone; under plain jit the gradients of a mesh are whole arrays, and need no agreement.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax, jax.numpy as jnp
    >>> policy = gradscale.DynamicScale()
    >>> state = policy.init(jnp.zeros(()))
    >>> def finite(nonfinite):  # on each rank of the axis
    ...     return gradscale_jax.agree(nonfinite, state, policy, "data").finite
    >>> print(jax.vmap(finite, axis_name="data")(jnp.asarray([0, 1, 0])))
    [False False False]
    """
    validation.policy(policy)
    state = trees.as_state(state)
    about = position(0, purpose=Purpose.COMPILED)
    vector = pack(registry.backend_for(state.scale), policy, state, nonfinite, (identify(policy), *about))
    if axis_name is not None:
        vector = AxisCollectives(axis_name).start_max(vector)()
    highest, lowest = vector[2 : 2 + _FIELDS], -vector[2 + _FIELDS :]
    found = vector[0]
    at_min_scale = jnp.logical_and(vector[1] != 0, found != 0)
    return Verdict(found, jnp.any(highest != lowest), at_min_scale, highest[:_KEPT], lowest[:_KEPT])
