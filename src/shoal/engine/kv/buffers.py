"""Memory for blocks on their way, used again: pages that are new cost more than the copy into them."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray


class Buffers:
    """Arrays of `size` bytes, of which at most `most` bytes are kept for later. May be called from any thread."""

    def __init__(self, size: int, most: int) -> None:
        self.size = size
        self._spare: deque[NDArray[np.uint8]] = deque(maxlen=most // size)

    def take(self, size: int) -> NDArray[np.uint8]:
        """An array of that many bytes, whatever is in it."""
        if size == self.size:
            try:
                return self._spare.pop()
            except IndexError:
                pass
        return np.empty(size, np.uint8)

    def give(self, data: NDArray[np.uint8]) -> None:
        """Nobody looks at `data` any more."""
        if data.nbytes == self.size:
            self._spare.append(data)
