"""KV blocks in host memory: the tier between the device and the disk."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from shoal.core.tiers import Digest


class HostTier:
    """Keeps at most `limit` bytes, the least recently used go first. Used by the engine's thread only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._kept: OrderedDict[Digest, NDArray[np.uint8]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def has(self, digest: Digest) -> bool:
        """Whether it is here."""
        return digest in self._kept

    def get(self, digest: Digest) -> NDArray[np.uint8] | None:
        """What is here under this digest; it counts as used."""
        data = self._kept.get(digest)
        if data is not None:
            self._kept.move_to_end(digest)
        return data

    def put(self, digest: Digest, data: NDArray[np.uint8]) -> None:
        """Keep `data`, which nobody changes any more, and let others go for it. One that is too large is not kept."""
        if digest in self._kept or data.nbytes > self.limit:
            return
        self._kept[digest] = data
        self.bytes += data.nbytes
        self.shrink(self.limit)

    def forget(self, digest: Digest) -> None:
        """Keep this no longer."""
        data = self._kept.pop(digest, None)
        if data is not None:
            self.bytes -= data.nbytes

    def shrink(self, limit: int) -> None:
        """Let the least recently used go until at most `limit` bytes are left."""
        while self.bytes > limit:
            _, data = self._kept.popitem(last=False)
            self.bytes -= data.nbytes
