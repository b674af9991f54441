"""Runs of a policy over sequences of clean (C) and overflowing (O) steps."""

from libraries import Library


def start(arrays: Library, policy, **numbers: float):
    """Return the first state of a policy, with some fields replaced."""
    state = policy.init(arrays.asarray(0.0))
    dtypes = dict(zip(state._fields, ("float32", "int32", "int32", "int32"), strict=True))
    return state._replace(**{name: arrays.asarray(number, dtypes[name]) for name, number in numbers.items()})


def follow(arrays: Library, policy, sequence: str, state=None):
    """Return the state after each step of a sequence."""
    state = policy.init(arrays.asarray(0.0)) if state is None else state
    states = []
    for step in sequence:
        state = policy.update(state, nonfinite=arrays.asarray(int(step == "O"), "int32"))
        states.append(state)
    return states


def scales(arrays: Library, policy, sequence: str, state=None) -> list[float]:
    """Return the scale after each step of a sequence."""
    return [arrays.state(state)[0] for state in follow(arrays, policy, sequence, state)]
