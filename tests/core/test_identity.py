"""IdentityMap: by identity, weakly, for any object."""

import gc
import weakref

from gradscale.core.identity import IdentityMap


class Thing:
    pass


class Slotted:
    __slots__ = ()


def test_of_objects_that_cannot_be_referenced_weakly_the_last_hundred_are_kept():
    mapping: IdentityMap[int] = IdentityMap()
    thing, last = Thing(), Slotted()
    mapping.put(thing, -1)
    for value in range(1000):
        last = Slotted()
        mapping.put(last, value)
    assert len(mapping.values()) == 101
    assert (mapping.by_id(id(thing)), mapping.by_id(id(last))) == (-1, 999)


def test_neither_an_object_in_a_cycle_nor_the_map_waits_for_another_reference():
    mapping: IdentityMap[Thing] = IdentityMap()
    thing, value = Thing(), Thing()
    thing.itself = thing  # type: ignore[attr-defined]
    mapping.put(thing, value)
    mapping.put(thing, value)
    held, cycle = weakref.ref(value), weakref.ref(thing)
    del thing
    gc.collect()
    assert (cycle(), mapping.values()) == (None, [])
    mapping.put(last := Thing(), value)
    gc.disable()
    try:
        del value, mapping
        assert held() is None
    finally:
        gc.enable()
    del last
