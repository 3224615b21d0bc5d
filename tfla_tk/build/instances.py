"""The kernel instances that are shipped: one source file, one set of macro definitions, one module."""

from __future__ import annotations

import functools
from dataclasses import dataclass

SCHEDULES = ("sequential", "overlapped", "pingpong")
DEFAULT_SCHEDULE = "overlapped"

# (K tile, V slice of one CTA); smaller head dims are padded to the tile, larger V takes several CTAs
MLSTM_TILES = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 64), (256, 128))
MAX_DIM_QK, MAX_DIM_V = 256, 512


@dataclass(frozen=True)
class Instance:
    """One kernel to compile.

    Attributes:
        name: The module's name, for instance ``mlstm_fwd_k128_v256_pingpong``.
        source: The kernel's file below ``kernels/``, for instance ``mlstm/mlstm_fwd.cu``.
        defines: Macros and their values.
    """

    name: str
    source: str
    defines: tuple[tuple[str, str], ...]


@functools.cache
def mlstm_fwd(dim_qk: int, dim_v: int, schedule: str = DEFAULT_SCHEDULE) -> Instance:
    """The mLSTM forward for head dims up to MAX_DIM_QK and MAX_DIM_V, by the smallest tile that holds them.

    Raises:
        ValueError: No tile is large enough, or there is no such schedule.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if not (0 < dim_qk <= MAX_DIM_QK and 0 < dim_v <= MAX_DIM_V):
        raise ValueError(f"head dims: expected at most {MAX_DIM_QK}/{MAX_DIM_V}, got {dim_qk}/{dim_v}")
    tile_qk = min(qk for qk, _ in MLSTM_TILES if qk >= dim_qk)
    slices = [v for qk, v in MLSTM_TILES if qk == tile_qk]
    slice_v = min((v for v in slices if v >= dim_v), default=max(slices))
    return Instance(
        f"mlstm_fwd_k{tile_qk}_v{slice_v}_{schedule}",
        "mlstm/mlstm_fwd.cu",
        (
            ("TFLA_DIM_QK", str(tile_qk)),
            ("TFLA_SLICE_V", str(slice_v)),
            ("TFLA_SCHEDULE", str(SCHEDULES.index(schedule))),
        ),
    )


def shipped_instances() -> list[Instance]:
    """Every instance that `schedule="auto"` takes; the other schedules are built when asked for."""
    return [mlstm_fwd(qk, v) for qk, v in MLSTM_TILES]
