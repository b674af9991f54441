"""Which adapter serves an object: entry-point group ``gradscale.backends``, by name, loaded lazily.

An entry point's name is the top-level module of the types it serves: ``numpy`` for arrays, ``mpi4py`` for
communicators. It is looked up along the type's MRO, so nothing is imported to decide, and only that adapter is loaded.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import arithmetic
from gradscale.core.backend import Backend
from gradscale.core.protocols import Array, Collectives, GroupBackend
from gradscale.core.validation import wrong_type
from gradscale.errors import BackendError, BackendNotAvailableError, InvalidTypeError, nearest, reading, short_repr
from gradscale.extras import remedy

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["all_collectives_for", "array_backend", "backend_for", "collectives_for", "get", "names", "refresh"]
__dir__ = __all__.copy

GROUP = "gradscale.backends"

# The extra of each library whose adapter comes with gradscale.
_EXTRAS = {"numpy": "numpy", "mpi4py": "mpi", "torch": "torch", "jax": "jax", "jaxlib": "jax", "mlx": "mlx"}
_EXTRAS |= {"nccl": "nccl4py"} | dict.fromkeys(("cupy", "cupy_backends", "cupyx"), "cupy")

A_GROUP = (
    "a communicator, such as MPI.COMM_WORLD, a torch ProcessGroup or DeviceMesh, an object with rank, size and "
    "start_max, or a list of these (one process alone wants gradscale.GradScaler)"
)

# The pure functions serve a library without an adapter.
_PURE = Backend()
_backends: dict[type, Backend] = {}


@cache
def _entry_points() -> dict[str, dict[str, EntryPoint]]:
    """Return the entry points by name and value, in a total order."""
    # Imported here: it would be most of the time of `import gradscale`.
    from importlib.metadata import entry_points

    by_name: dict[str, dict[str, EntryPoint]] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        by_name.setdefault(entry.name, {})[entry.value] = entry
    return by_name


def names() -> list[str]:
    """Return the names of all registered adapters, sorted; none is imported.

    Examples
    --------
    >>> import gradscale
    >>> names = gradscale.registry.names()
    >>> "numpy" in names and "torch" in names
    True
    """
    return sorted(_entry_points())


def refresh() -> None:
    """Look for adapters again, after one was installed while this process runs.

    Examples
    --------
    >>> import gradscale
    >>> gradscale.registry.refresh()
    >>> "numpy" in gradscale.registry.names()
    True
    """
    _entry_points.cache_clear()
    get.cache_clear()
    _backends.clear()


@cache
def get(name: str) -> Any:
    """Return the adapter of one name, imported at the first call.

    Raises
    ------
    BackendNotAvailableError
        If none is registered, or it cannot be imported; with the pip command, and the import's failure as the cause.
    BackendError
        If two are registered under the name, since two ranks could run two adapters; or if the adapter fails otherwise.

    Examples
    --------
    >>> import gradscale
    >>> gradscale.registry.get("numpy").name
    'numpy'
    """
    candidates = [*_entry_points().get(name, {}).values()]
    if not candidates:
        hint = remedy(_EXTRAS[name]) if name in _EXTRAS else "install the package that provides it"
        msg = f"no gradscale adapter is registered for {name!r}; {hint}. Registered: {', '.join(names()) or 'none'}"
        msg += nearest(name, names())
        raise BackendNotAvailableError(msg)
    if len(candidates) > 1:
        owners = [entry.dist.name if entry.dist else "an unknown distribution" for entry in candidates]
        both = " and ".join(f"{entry.value} (from {owner})" for entry, owner in zip(candidates, owners, strict=True))
        msg = f"{len(candidates)} gradscale adapters are registered for {name!r}: {both}; uninstall all but one"
        raise BackendError(msg)
    entry = candidates[0]
    try:
        return entry.load()
    except BackendNotAvailableError:
        # It says what is missing, and what to do.
        raise
    except ImportError as error:
        hint = f"; {remedy(_EXTRAS[name])}" if name in _EXTRAS else ""
        msg = f"the gradscale adapter for {name!r}, {entry.value}, cannot be imported: {error}{hint}"
        raise BackendNotAvailableError(msg) from error
    except Exception as error:
        msg = f"the gradscale adapter for {name!r}, {entry.value}, failed while it was loaded: {error!r}"
        raise BackendError(msg) from error


def _registered_name(kind: type) -> str | None:
    """Return the first top-level module along a type's MRO that has an adapter."""
    for base in kind.__mro__:
        name = base.__module__.partition(".")[0]
        if name in _entry_points():
            return name
    return None


def backend_for(x: Array) -> Backend:
    """Return the adapter for an array; the pure core itself if its library has none.

    BackendNotAvailableError if the library lacks names that the pure core needs, with a list of them.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> gradscale.registry.backend_for(np.zeros(3)).name
    'numpy'
    >>> gradscale.registry.backend_for(3.0).name  # no library's
    'generic'
    """
    kind: type = type(x)
    # A plain dictionary: compilers that trace Python enter functions behind a cache.
    if kind not in _backends:
        name = _registered_name(kind)
        # The numbers that stand for arrays have only what policies need.
        if name is None and kind.__module__.partition(".")[0] != "gradscale" and is_array_api_obj(x):
            _require_standard(x)
        _backends[kind] = _PURE if name is None else array_backend(name)
    return _backends[kind]


def _require_standard(x: Array) -> None:
    if missing := arithmetic.lacks(x):
        library = arithmetic.library_name(array_namespace(x))
        gaps = "; ".join(f"{kind} {', '.join(names)}" for kind, names in missing.items())
        msg = (
            f"{library} lacks what gradscale needs of the array API standard of 2023.12 or newer, got {gaps} missing "
            f"and no adapter registered: write one, derived from gradscale.Backend, and register it (given as backend= "
            f"alone it leaves a policy's state to these), or convert the arrays"
        )
        raise BackendNotAvailableError(msg)


def array_backend(name: str) -> Backend:
    """Return the adapter of one name, a :class:`gradscale.Backend`; BackendError if it is another one.

    Examples
    --------
    >>> import gradscale
    >>> isinstance(gradscale.registry.array_backend("numpy"), gradscale.Backend)
    True
    """
    backend = get(name)
    if isinstance(backend, Backend):
        return backend
    msg = (
        f"the gradscale adapter for {name!r} must be an instance of a class that derives from gradscale.Backend, got "
        f"{short_repr(backend)} of type {type(backend).__name__}"
    )
    raise BackendError(msg)


def all_collectives_for(group: object, timeout: float) -> list[Collectives]:
    """Return the collectives of a group, or of each in a list, as ``collectives_for``; InvalidTypeError for no group.

    Examples
    --------
    >>> import gradscale
    >>> def groups(group):
    ...     return [one.size for one in gradscale.registry.all_collectives_for([group, group], timeout=10.0)]
    >>> gradscale.testing.run_ranks(2, groups)
    [[2, 2], [2, 2]]
    """
    with reading("group"):
        groups = list(group) if isinstance(group, (list, tuple)) else [group]
    if not groups:
        msg = f"group must name at least one group, got {short_repr(group)}"
        raise InvalidTypeError(msg)
    return [collectives_for(one, timeout) for one in groups]


def collectives_for(group: object, timeout: float) -> Collectives:
    """Return the collectives of a group: the object itself if it has them, else its library's adapter's.

    Parameters
    ----------
    group : object
        A communicator of a library with an adapter, or an object with ``rank``, ``size`` and ``start_max``;
        InvalidTypeError for any other.
    timeout : float
        Seconds until a collective is given up for a rank that never came.

    Examples
    --------
    >>> import gradscale
    >>> def rank(group):
    ...     return gradscale.registry.collectives_for(group, timeout=10.0).rank
    >>> gradscale.testing.run_ranks(3, rank)
    [0, 1, 2]
    """
    with reading("group"):
        # MPI's null communicator raises when its rank is read, so start_max is checked first.
        if hasattr(group, "start_max") and hasattr(group, "rank") and hasattr(group, "size"):
            collectives: Collectives = group
            return collectives
    name = _registered_name(type(group))
    backend = None if name is None else get(name)
    if isinstance(backend, GroupBackend):
        return backend.collectives(group, timeout=timeout)
    advice = ": torch's group.WORLD is None until torch.distributed.init_process_group() is called"
    raise wrong_type(group, "group", A_GROUP, advice if group is None else "")
