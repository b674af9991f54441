"""What shares memory, told from addresses and strides: overlaps_itself against a look at every element."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale.core.aliasing import overlaps_itself

AXES = st.lists(st.tuples(st.integers(0, 5), st.integers(-16, 16)), max_size=4)


def enumerated(axes: list[tuple[int, int]], itemsize: int) -> bool:
    """Look at every element."""
    places = itertools.product(*(range(length) for length, _ in axes))
    starts = sorted(sum(k * stride for k, (_, stride) in zip(place, axes, strict=True)) for place in places)
    return any(after - before < itemsize for before, after in itertools.pairwise(starts))


@given(AXES, st.sampled_from([1, 2, 4]))
@settings(max_examples=200, deadline=None)
def test_it_says_what_a_look_at_every_element_says(axes: list[tuple[int, int]], itemsize: int):
    shape, strides = [length for length, _ in axes], [stride for _, stride in axes]
    assert overlaps_itself(shape, strides, itemsize) == enumerated(axes, itemsize)


def test_layouts_of_too_many_elements_to_be_listed_are_known():
    for shape, strides, expected in (
        ((30_000_000,), (0,), True),
        ((10**9, 10**9), (10**9, 0), True),
        ((10**9, 10**9), (0, 1), True),
        ((10**6, 10**6), (3, 2 * 10**6 + 11), False),
        ((10**6, 10**6), (2, 10**6), True),
    ):
        assert overlaps_itself(shape, strides) is expected
