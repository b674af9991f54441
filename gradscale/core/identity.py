"""IdentityMap: values for objects, by identity and weakly, even without a hash."""

import weakref
from typing import TypeVar

_MOST_KEPT = 100

_Value = TypeVar("_Value")


class IdentityMap(dict[int, _Value]):
    """A mapping from the ``id()`` of objects, which does not keep them alive: an entry goes with its object.

    ``WeakKeyDictionary`` merges objects that compare equal and takes none without a hash. Objects that cannot be
    referenced weakly, since their class has ``__slots__``, are kept alive by the map: the last 100 of them.
    """

    def __init__(self) -> None:
        self._objects: dict[int, object] = {}
        self._kept: list[int] = []

    def set(self, key: object, value: _Value) -> None:
        """Set the value of an object."""
        identity = id(key)
        if identity not in self:
            # Weakly, because a cycle would keep the map and its arrays until the collector runs.
            this = weakref.ref(self)

            def forget(_: object) -> None:
                if (alive := this()) is not None:
                    alive._drop(identity)

            try:
                self._objects[identity] = weakref.ref(key, forget)
            except TypeError:
                self._objects[identity] = key
                self._kept.append(identity)
            if len(self._kept) > _MOST_KEPT:
                self._drop(self._kept.pop(0))
        self[identity] = value

    def _drop(self, identity: int) -> None:
        self.pop(identity, None)
        self._objects.pop(identity, None)


def assign_position(positions: IdentityMap[int], key: object) -> int:
    """Give a new object the first position in a list that no object alive has, and return it."""
    used = positions.values()
    position = next(index for index in range(len(used) + 1) if index not in used)
    positions.set(key, position)
    return position
