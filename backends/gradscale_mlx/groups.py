"""MlxCollectives: agreement over MLX's process groups, whatever carries them: ring, MPI, NCCL or JACCL."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import mlx.core as mx

from gradscale import registry
from gradscale.core.protocols import Array
from gradscale.waiting import GroupWait, in_thread, require_message


class _Identity:
    """Stands for a group, whose own objects have no weak references; and ``init`` returns another one at each call."""


_WORLD = _Identity()
# Kept with their groups, so that no other object has the id of one of these.
_parts: dict[int, tuple[mx.distributed.Group, _Identity]] = {}


def _identity_of(group: mx.distributed.Group) -> _Identity:
    if group.size() == mx.distributed.init().size():
        return _WORLD
    return _parts.setdefault(id(group), (group, _Identity()))[1]


class MlxCollectives:
    """MAX all-reduces over a group of ``mlx.core.distributed``.

    They are on MLX's default stream, in order with the program's own collectives: those of two streams would meet on
    one connection.

    Raises
    ------
    CollectiveTimeoutError
        When some rank does not come within ``timeout`` seconds. MLX cannot take back what it waits for.
    BackendError
        When MLX fails, as for a rank that has ended, or an earlier collective over the group was given up; in a child
        after fork.

    Examples
    --------
    >>> import gradscale_mlx, mlx.core as mx
    >>> collectives = gradscale_mlx.MlxCollectives(mx.distributed.init(), timeout=10.0)  # of one process
    >>> collectives.start_max(mx.array([1, -2]))()
    array([1, -2], dtype=int32)
    """

    def __init__(self, group: mx.distributed.Group, timeout: float) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._timeout = timeout
        self._comm = group
        # One for all that mx.distributed.init returns, and one for each group of a part of these ranks.
        self.identity = _identity_of(group)
        self._group = GroupWait(
            self.identity,
            library="MLX",
            timeout=timeout,
            refusal=f"an agreement over this group was given up on rank {self.rank} of {self.size}, and MLX may still "
            f"wait for it: end the process, and start all ranks again from a checkpoint",
            rank=self.rank,
            size=self.size,
            on_give_up=self._keep_for_good,
        )
        self.within = self._group.within

    def __repr__(self) -> str:
        return f"MlxCollectives(rank={self.rank}, size={self.size}, timeout={self._timeout})"

    def start_max(self, x: Array, /) -> Callable[[], Array]:
        """Begin a MAX all-reduce as :class:`gradscale.Collectives` do; the host reads another library's array now."""
        require_message(x)
        is_own = isinstance(x, mx.array)
        sent = x if is_own else mx.array(registry.backend_for(x).read(x), mx.int32)
        result = self._group.run(self._started, sent)

        def finish() -> Array:
            self._group.run(self._wait, result)
            return result if is_own else registry.backend_for(x).integers(result.tolist(), x)

        return finish

    def example(self) -> mx.array:
        """Return a 0-d float32 array: a rank that never has an array takes part with MLX's."""
        return mx.zeros((), mx.float32)

    def _keep_for_good(self, _: BaseException) -> None:
        """Let Python never free the group: MLX would wake the thread that waits, and so abort a process that ends."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._comm))

    def _started(self, x: mx.array) -> mx.array:
        # Evaluated in the order of the calls, which is the same on every rank.
        result = mx.distributed.all_max(x, group=self._comm)
        mx.async_eval(result)
        return result

    def _wait(self, result: mx.array) -> None:
        """Evaluate in a thread, since MLX does not say whether an array is done; raise what it raises."""
        evaluation = in_thread(lambda: mx.eval(result))
        self._group.until(evaluation.done)
        evaluation.result()
