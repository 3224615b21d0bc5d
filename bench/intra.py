"""The intra-chunk mLSTM kernel: one chunk of all tokens, to compare schedules at long chunks.

An instrument and no backend's kernel: its sources lie in bench/kernels, and include what the kernels share.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.build import instances
from tfla_tk.core.checks import check_device, check_shape
from tfla_tk.core.layout import DTYPES

ROOT = Path(__file__).resolve().parent / "kernels"
SCHEDULES = (*instances.SCHEDULES, "three_stage")
# (K tile, V slice of one CTA); smaller head dims are padded to the tile, larger V takes several CTAs
TILES = ((64, 64), (128, 128), (128, 256), (256, 128))
_QUERY_TILE = 128  # kPadding of mlstm_intra_config.cuh
GRID_LIMIT = 65535  # CTAs along a grid's second and third dimension


def instance(dim_qk: int, dim_v: int, schedule: str = instances.DEFAULT_SCHEDULE) -> build.Instance:
    """The kernel for head dims up to 256 and 512, by the smallest tile that holds them.

    Raises:
        ValueError: No tile is large enough, or there is no such schedule.
    """
    found = instances.by_tile(
        "mlstm_intra", "intra/mlstm_intra.cu", TILES, SCHEDULES, dim_qk, dim_v, schedule
    )
    return replace(found, bindings="intra/bindings_intra.cpp", root=ROOT)


def all_instances() -> list[build.Instance]:
    """Every tile with every schedule."""
    return [instance(qk, v, schedule) for schedule in SCHEDULES for qk, v in TILES]


def mlstm_intra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    schedule: str = instances.DEFAULT_SCHEDULE,
    eps: float = 1e-6,
) -> Tensor:
    """h of mLSTM with exponential input gate and no initial state, in quadratic time.

    Args:
        q, k: [B, NH, S, K]. v: [B, NH, S, V]. bfloat16 on one GPU; K up to 256 and V up to 512, multiples
            of 16.
        i, f: [B, NH, S] gate pre-activations.
        schedule: One of SCHEDULES.
        eps: Added to the normaliser after the maximum.

    Returns:
        h [B, NH, S, V] in bfloat16.

    Raises:
        ValueError: Operands that the kernel does not take, or an unknown schedule.
        BuildError: The kernel is not compiled yet and cannot be.
        RuntimeError: The launch was refused.
    """
    batch, heads, seq, dim_qk = q.shape
    dim_v = v.shape[-1]
    rows = (batch, heads, seq)
    for name, x, shape, layout in (
        ("k", k, (*rows, dim_qk), "[B, NH, S, K]"),
        ("v", v, (*rows, dim_v), "[B, NH, S, V]"),
        ("i", i, rows, "[B, NH, S]"),
        ("f", f, rows, "[B, NH, S]"),
    ):
        check_shape(name, x, shape, layout)
        check_device(name, x, q.device)
    if batch * heads > GRID_LIMIT:
        raise ValueError(f"batch times heads: expected at most {GRID_LIMIT}, got {batch * heads}")
    if {x.dtype for x in (q, k, v)} != {torch.bfloat16} or q.device.type != "cuda":
        raise ValueError(f"q, k, v: expected torch.bfloat16 on a GPU, got {q.dtype} on {q.device}")
    if dim_qk % 16 or dim_v % 16:
        raise ValueError(f"head dims: expected multiples of 16, got {dim_qk}/{dim_v}")
    kernel = build.load(instance(dim_qk, dim_v, schedule))
    q, k, v = (x.contiguous() for x in (q, k, v))
    i, f = (x.float().contiguous() for x in (i, f))
    h = torch.empty_like(v)
    if h.numel() == 0:
        return h
    padded = -(-seq // _QUERY_TILE) * _QUERY_TILE
    workspace = torch.empty((batch, heads, 4, padded), dtype=torch.float32, device=q.device)
    with torch.cuda.device(q.device):
        kernel.mlstm_intra(
            *(_rows(x) for x in (q, k, v, h)),
            *((*_rows(x[..., None]), DTYPES[x.dtype]) for x in (i, f)),
            workspace=workspace.data_ptr(),
            sizes=(batch, heads, seq, dim_qk, dim_v),
            scale=dim_qk**-0.5,
            eps=eps,
            device=q.device.index,
            stream=torch.cuda.current_stream().cuda_stream,
        )
    return h


def _rows(x: Tensor) -> tuple[int, int, int, int]:
    """Address, batch, head and row stride of a contiguous [B, NH, S, D] tensor."""
    _, heads, seq, dim = x.shape
    return x.data_ptr(), heads * seq * dim, seq * dim, dim
