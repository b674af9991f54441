"""Where an array is, and how one is made there: some libraries of the array API standard know of no device."""

from __future__ import annotations

import array_api_compat

from gradscale.core.protocols import Array


def device(x: Array) -> object:
    """Return an array's device; None if the arrays of its library have none."""
    try:
        return array_api_compat.device(x)
    except AttributeError:
        return None


def on(where: object) -> dict[str, object]:
    """Return the options that make an array on a device; none for None, as not all take ``device=``."""
    return {} if where is None else {"device": where}
