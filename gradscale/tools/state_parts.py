"""The states of training loops as named parts, and in which parts two of them differ."""

import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import is_dataclass
from typing import Any, TypeAlias

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import registry, tree
from gradscale.errors import short_repr

State: TypeAlias = dict[str, tuple[str, Sequence[Any]]]
"""By name, such as ``optimizer.state[0].exp_avg``: what a part is, and its values as Python has them."""


def parts_of(state: object, name: str = "") -> State:
    """Return the parts of nested containers, dataclasses and objects with ``state_dict()``; functions are left out."""
    parts: State = {}
    for path, leaf in tree.leaves_with_paths(state, _is_leaf):
        place = (name + re.sub(r"\['(.*?)'\]", r".\1", path)).lstrip(".")
        if isinstance(leaf, type):
            continue
        if hasattr(leaf, "state_dict"):
            parts |= parts_of(leaf.state_dict(), place)
        elif is_array_api_obj(leaf):
            values = _values(leaf)
            parts[place] = f"{len(values)} values of {leaf.dtype} and shape {tuple(leaf.shape)}", values
        elif isinstance(leaf, Set):
            parts[place] = type(leaf).__name__, [", ".join(sorted(map(repr, leaf)))]
        elif not callable(leaf):
            # An object may be another one after the next step.
            is_plain = leaf is None or isinstance(leaf, (int, float, complex, str, bytes))
            parts[place] = type(leaf).__name__, [leaf if is_plain else repr(leaf)]
    return parts


def _is_leaf(node: object) -> bool:
    is_container = isinstance(node, (Mapping, Sequence)) or is_dataclass(node)
    return hasattr(node, "state_dict") or isinstance(node, (str, bytes, type)) or not is_container


def _values(x: Any) -> Sequence[Any]:
    """Return the values of an array on this rank, packed if they are floating."""
    x = registry.backend_for(x).values_of(x)
    flat: Any = [] if x is None else array_namespace(x).reshape(x, (-1,))
    values = flat.tolist() if hasattr(flat, "tolist") else [complex(value) for value in flat]
    return array("d", values) if {float}.issuperset(map(type, values)) else values


def differences(ours: State, theirs: State, rtol: float, exempt: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return the name of each part in which two states differ, and the first values that do, as text."""
    rows = []
    for name in theirs | ours:
        # The state inside of gradscale_jax's scaled() and guarded() is an optimizer's, and not a scaler's.
        if any(word in name.lower().replace("gradscale_inner_state", "") for word in exempt):
            continue
        (form, a), (their_form, b) = ours.get(name, ("absent", [])), theirs.get(name, ("absent", []))
        if form != their_form:
            rows.append((name, form, their_form))
        elif _bits(a) != _bits(b) and (place := _first_difference(a, b, rtol)) is not None:
            where = f" at element {place}" if len(a) > 1 else ""
            rows.append((name, short_repr(a[place]) + where, short_repr(b[place])))
    return rows


def _bits(values: Sequence[Any]) -> bytes | str:
    """Return the bits of packed values, or the text of others, for a comparison."""
    return values.tobytes() if isinstance(values, array) else repr(values)


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any], rtol: float) -> int | None:
    """Return where numbers differ first; NaN is like NaN."""
    # Sums in another order differ by the size of what is summed, which may cancel.
    limit = rtol * max((abs(x) for x in theirs if isinstance(x, float) and math.isfinite(x)), default=0.0)
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((k for k, (a, b) in pairs if repr(a) != repr(b) and not (limit > 0.0 and abs(a - b) <= limit)), None)
