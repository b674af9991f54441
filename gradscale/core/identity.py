"""IdentityMap: values for objects, by identity and weakly, whether or not the objects can be hashed."""

import weakref
from typing import Generic, TypeVar

_MOST_KEPT = 100

_Value = TypeVar("_Value")


class IdentityMap(Generic[_Value]):
    """A mapping keyed by the object itself, which does not keep it alive.

    ``WeakKeyDictionary`` merges objects that compare equal and takes none without a hash. Objects that cannot be
    referenced weakly, since their class has ``__slots__``, are kept alive by the map: the last 100 of them.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[object, _Value]] = {}
        self._kept: list[int] = []

    def put(self, key: object, value: _Value) -> None:
        """Set the value of an object."""
        identity = id(key)
        if identity in self._entries:
            self._entries[identity] = self._entries[identity][0], value
            return
        # Weakly, because a cycle would keep the map and its arrays until the collector runs.
        this = weakref.ref(self)

        def forget(_: object) -> None:
            if (alive := this()) is not None:
                alive._entries.pop(identity, None)

        try:
            reference: object = weakref.ref(key, forget)
        except TypeError:
            reference = key
            self._kept.append(identity)
        self._entries[identity] = (reference, value)
        if len(self._kept) > _MOST_KEPT:
            del self._entries[self._kept.pop(0)]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._entries

    def by_id(self, identity: int) -> _Value | None:
        """Return the value of the object with this ``id()``; None without one."""
        entry = self._entries.get(identity)
        return None if entry is None else entry[1]

    def values(self) -> list[_Value]:
        """Return the values of all objects that are alive."""
        return [value for _, value in self._entries.values()]
