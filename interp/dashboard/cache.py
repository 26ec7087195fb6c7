"""Results that were computed once, the least recently used dropped when they take too much room."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class BoundedCache:
    """Values by key, from several threads; each is computed once, by whoever asks first.

    Args:
        most: Largest sum of the values' sizes. The newest value stays whatever its size.
        size_of: Size of a value; by default each counts 1.
    """

    def __init__(self, most: int, size_of: Callable[[Any], int] = lambda value: 1):
        self._most, self._size_of = most, size_of
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._working: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of a key, made now where it is not there. What `make` raises is not kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            working = self._working.setdefault(key, threading.Lock())
        with working:
            with self._lock:
                if key in self._values:
                    return self._values[key]
            try:
                value = make()
                self._keep(key, value)
            finally:
                with self._lock:
                    self._working.pop(key, None)
        return value

    def _keep(self, key: Hashable, value: Any) -> None:
        with self._lock:
            self._values[key] = value
            while len(self._values) > 1 and self.size() > self._most:
                self._values.popitem(last=False)

    def size(self) -> int:
        """Sum of the sizes of what is kept."""
        return sum(self._size_of(value) for value in self._values.values())

    def begun(self, key: Hashable) -> bool:
        """Whether a value is there or being made: `get` makes nothing anew then."""
        with self._lock:
            return key in self._values or key in self._working

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values
