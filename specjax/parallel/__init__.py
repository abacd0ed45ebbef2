"""Where arrays lie: the device mesh, partition rules, and process start-up. The lowest layer; it knows no model."""

from specjax.parallel.agreement import Agreement
from specjax.parallel.distributed import PLATFORMS, Process, initialize, require_platform, topology
from specjax.parallel.mesh import AXES, active_mesh, axis_sizes, describe, make_mesh, row_shards
from specjax.parallel.own_rows import on_own_rows
from specjax.parallel.placement import Placement, beside, make_placement, mesh_of, on_mesh_of, to_host, whole_shares
from specjax.parallel.rules import (
    PRESETS,
    ROLES,
    Role,
    batch_shardings,
    param_shardings,
    replicated,
    rows_are_spread,
    spread_rows,
    state_shardings,
    whole_vectors,
)

__all__ = [
    "AXES",
    "PLATFORMS",
    "PRESETS",
    "ROLES",
    "Agreement",
    "Placement",
    "Process",
    "Role",
    "active_mesh",
    "axis_sizes",
    "batch_shardings",
    "beside",
    "describe",
    "initialize",
    "make_mesh",
    "make_placement",
    "mesh_of",
    "on_mesh_of",
    "on_own_rows",
    "param_shardings",
    "replicated",
    "require_platform",
    "row_shards",
    "rows_are_spread",
    "spread_rows",
    "state_shardings",
    "to_host",
    "topology",
    "whole_shares",
    "whole_vectors",
]
