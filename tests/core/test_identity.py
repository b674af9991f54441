"""IdentityMap: by identity, weakly, for any object."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from gradscale.core.identity import IdentityMap


class Thing:
    pass


class Equal:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class Slotted:
    __slots__ = ()


def test_values_are_found_by_the_object() -> None:
    mapping: IdentityMap[int] = IdentityMap()
    things: list[Any] = [Thing(), Equal(), Equal(), Slotted(), [], {}, Thing]
    for value, thing in enumerate(things):
        assert thing not in mapping
        mapping.put(thing, value)
    assert [mapping[thing] for thing in things] == list(range(len(things)))
    assert len(mapping) == len(things)
    mapping.put(things[1], 70)
    assert (mapping[things[1]], mapping[things[2]], len(mapping)) == (70, 2, len(things))
    with pytest.raises(KeyError):
        mapping[Thing()]


def test_an_object_is_forgotten_when_it_dies_and_its_address_is_free() -> None:
    mapping: IdentityMap[str] = IdentityMap()
    for _ in range(100):
        thing = Thing()
        # The address of the one before is often handed on.
        assert thing not in mapping
        mapping.put(thing, "value")
        assert len(mapping) == 1
        del thing
    assert len(mapping) == 0


def test_an_object_in_a_cycle_is_not_kept_alive() -> None:
    mapping: IdentityMap[str] = IdentityMap()
    thing: Any = Thing()
    thing.itself = thing
    reference = weakref.ref(thing)
    mapping.put(thing, "value")
    mapping.put(thing, "another")
    del thing
    gc.collect()
    assert reference() is None
    assert len(mapping) == 0


def test_an_object_that_cannot_be_referenced_weakly_keeps_its_address() -> None:
    mapping: IdentityMap[int] = IdentityMap()
    for value in range(20):
        mapping.put(Slotted(), value)
    assert len(mapping) == 20


def test_of_objects_that_cannot_be_referenced_weakly_the_last_hundred_are_kept() -> None:
    mapping: IdentityMap[int] = IdentityMap()
    thing, last = Thing(), Slotted()
    mapping.put(thing, -1)
    for value in range(1000):
        last = Slotted()
        mapping.put(last, value)
    assert len(mapping) == 101
    assert (mapping[thing], mapping[last]) == (-1, 999)


def test_a_map_is_no_cycle_and_goes_with_its_last_reference() -> None:
    thing = Thing()
    gc.disable()
    try:
        mapping: IdentityMap[Thing] = IdentityMap()
        value = Thing()
        mapping.put(thing, value)
        held = weakref.ref(value)
        del value, mapping
        assert held() is None
    finally:
        gc.enable()
    del thing
