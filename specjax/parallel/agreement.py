"""What processes decide together while they run."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LAG = 2  # Steps that an answer may take, so that no host waits for the devices.


class Agreement:
    """Whether any process wants something, at the same step for all.

    Asked at every step, it costs one reduction of a flag a step and no waiting: of several processes, the answer is
    that of the step `LAG` before.
    """

    def __init__(self, mesh: Mesh | None = None):
        """Prepares for a mesh over the devices of all processes; their devices in a row by default."""
        self._mesh = Mesh(np.asarray(jax.devices()), ("all",)) if mesh is None else mesh
        self._asked: collections.deque[jax.Array] = collections.deque()
        self._any = jax.jit(jnp.any, out_shardings=NamedSharding(self._mesh, PartitionSpec()))

    def ask(self, wanted: bool) -> bool:
        """To be called by every process at every step."""
        if jax.process_count() == 1:
            return wanted
        everywhere = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        flags = jax.make_array_from_callback((self._mesh.size,), everywhere, lambda index: np.full(1, wanted))
        self._asked.append(self._any(flags))
        return bool(self._asked.popleft()) if len(self._asked) > LAG else False
