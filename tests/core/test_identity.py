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


def test_of_objects_that_cannot_be_referenced_weakly_the_last_hundred_are_kept() -> None:
    mapping: IdentityMap[int] = IdentityMap()
    thing, last = Thing(), Slotted()
    mapping.put(thing, -1)
    for value in range(1000):
        last = Slotted()
        mapping.put(last, value)
    assert len(mapping) == 101
    assert (mapping[thing], mapping[last]) == (-1, 999)


def test_neither_an_object_in_a_cycle_nor_the_map_waits_for_another_reference() -> None:
    mapping: IdentityMap[Thing] = IdentityMap()
    thing, value = Thing(), Thing()
    thing.itself = thing  # type: ignore[attr-defined]
    mapping.put(thing, value)
    mapping.put(thing, value)
    held, cycle = weakref.ref(value), weakref.ref(thing)
    del thing
    gc.collect()
    assert (cycle(), len(mapping)) == (None, 0)
    mapping.put(last := Thing(), value)
    gc.disable()
    try:
        del value, mapping
        assert held() is None
    finally:
        gc.enable()
    del last
