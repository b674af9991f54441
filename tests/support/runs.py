"""States of policies in each library."""

from libraries import Library


def start(arrays: Library, policy, **numbers: float):
    """Return the first state of a policy, with some fields replaced."""
    state = policy.init(arrays.asarray(0.0))
    dtypes = dict(zip(state._fields, ("float32", "int32", "int32", "int32"), strict=True))
    return state._replace(**{name: arrays.asarray(number, dtypes[name]) for name, number in numbers.items()})
