"""The kernels for the numbers per row of the mLSTM backward on the GPU, against their formulas in fp64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.prepared import operand as _operand
from tfla_tk.backends.tk.prepared import pointer as _pointer
from tfla_tk.backends.tk.scalar_gate.walks import PART_COLUMNS
from tfla_tk.build import instances

from .accuracy import relative_error
from .memory import launch, normal
from .mlstm_formulas import row_factors

EPS = 1e-6


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return build.load(instances.CHUNKWISE[False], *map(instances.mlstm_bwd_rows, (False, True)))


def draw_rows(size: tuple[int, int, int], dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """dh, h, d, m."""
    d, m = normal(*size, seed=3), 3 * normal(*size, seed=4)
    return normal(*size, dim, dtype=dtype, seed=1), normal(*size, dim, dtype=dtype, seed=2), d, m


def sum_products(dh: Tensor, h: Tensor) -> Tensor:
    """dh_t.h_t."""
    return (dh.double() * h.double()).sum(-1)


def run_rows(
    kernel: ModuleType, dh: Tensor, h: Tensor, d: Tensor, m: Tensor | None, part_columns: int = PART_COLUMNS
) -> tuple[Tensor, Tensor]:
    """log2 w and e, of every part of V: [parts, B, NH, S]."""
    parts = -(-h.shape[-1] // part_columns)
    log2_w = torch.full_like(d, torch.nan)
    e = d.new_full((parts, d.numel() + 8), torch.nan)  # with other memory between parts
    device = h.get_device()
    launch(
        kernel,
        "mlstm_bwd_rows",
        _operand(dh),
        _operand(h),
        (_pointer(d), _pointer(m), EPS),
        (log2_w.data_ptr(), e.data_ptr(), e.stride(0)),
        (*h.shape, part_columns),
        h.dtype == torch.float16,
        device=device,
    )
    assert e[:, d.numel() :].isnan().all()
    return log2_w, e[:, : d.numel()].unflatten(1, d.shape)


def row_factors_of_parts(
    dh: Tensor, h: Tensor, d: Tensor, m: Tensor | None, part_columns: int = PART_COLUMNS
) -> tuple[Tensor, Tensor]:
    """As `run_rows`, in fp64."""
    parts = zip(dh.split(part_columns, dim=-1), h.split(part_columns, dim=-1), strict=True)
    found = [row_factors(sum_products(*part), d, m, EPS) for part in parts]
    return found[0][0], torch.stack([e for _, e in found])


def draw_dots(slices: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """dots [slices, rows], with other memory between slices, d and m; the first row is above its floor."""
    wide = torch.full((slices, rows + 7), torch.nan, device="cuda")
    dots = wide[:, :rows].copy_(normal(slices, rows, seed=1))
    d, m = normal(rows, seed=3), 3 * normal(rows, seed=4)
    d[0], m[0] = -50.0, 0.0
    return dots, d, m


def run_factors(
    kernel: ModuleType, dots: Tensor, d: Tensor, m: Tensor | None, part_slices: int = 4
) -> Tensor:
    """e of every part of V, [parts, rows], with nothing written behind their last row."""
    slices, rows = dots.shape
    wide = torch.full((-(-slices // part_slices), rows + 1000), torch.nan, device="cuda")
    device = dots.get_device()
    launch(
        kernel,
        "mlstm_bwd_factors",
        (dots.data_ptr(), dots.stride(0), slices, part_slices),
        (_pointer(d), _pointer(m), EPS),
        (0, wide.data_ptr(), wide.stride(0)),
        rows,
        device=device,
    )
    assert wide[:, rows:].isnan().all()
    return wide[:, :rows]


def assert_factors(found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found[0].double(), truth[0], rtol=1e-6, atol=3e-6)
    assert relative_error(found[1], truth[1]) <= 1e-5


@pytest.mark.parametrize(
    ("dim", "part_columns"),
    [*((dim, PART_COLUMNS) for dim in (16, 48, 64, 80, 128, 256, 272, 512)), (176, 64)],
)
@pytest.mark.parametrize("size", [(1, 1, 1), (2, 3, 63), (1, 2, 1000)], ids="B{0[0]}_NH{0[1]}_S{0[2]}".format)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_row_factors(
    layout: str,
    size: tuple[int, int, int],
    dim: int,
    part_columns: int,
    dtype: torch.dtype,
    kernel: ModuleType,
) -> None:
    dh, h, d, m = draw_rows(size, dim, dtype)
    if layout == "transposed":
        dh, h = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dh, h))
    for given in (m, None):
        found = run_rows(kernel, dh, h, d, given, part_columns)
        truth = row_factors_of_parts(dh, h, d, given, part_columns)
        assert_factors(found, truth)


def test_row_factors_at_the_ends_of_the_range(kernel: ModuleType) -> None:
    """e^{-m} is inf below -88.7 and 0 above 103; log2 w stays finite, and NaN shows."""
    dh, h, d, m = draw_rows((1, 2, 500), 256, torch.bfloat16)
    m *= 100.0
    m[0, 0, :2] = torch.tensor([-1e5, 1e5])
    d[0, 0, 2:4] = 0.0
    log2_w, e = run_rows(kernel, dh, h, d, m)
    assert log2_w.isfinite().all() and e.isfinite().all()
    assert_factors((log2_w, e), row_factors_of_parts(dh, h, d, m))
    d[0, 1, 7] = torch.nan
    dh[0, 1, 9, 200] = torch.nan
    m.fill_(100.0)
    log2_w, e = run_rows(kernel, dh, h, d, m)
    assert log2_w.isnan().nonzero().tolist() == [[0, 1, 7]]
    assert e.isnan().nonzero().tolist() == [[0, 0, 1, 9]]


@pytest.mark.parametrize("rows", [1, 63, 3 * 1000])
@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("part_slices", [1, 2, 4])
def test_row_factors_from_dots(part_slices: int, slices: int, rows: int, kernel: ModuleType) -> None:
    dots, d, m = draw_dots(slices, rows)
    of_parts = [part.double().sum(0) for part in dots.split(part_slices)]
    for given in (m, None):
        truth = torch.stack([row_factors(part, d, given, EPS)[1] for part in of_parts])
        assert truth.any()
        assert relative_error(run_factors(kernel, dots, d, given, part_slices), truth) <= 1e-5


def test_row_factors_from_dots_at_the_ends_of_the_range(kernel: ModuleType) -> None:
    """As those from dh and h."""
    dots, d, m = draw_dots(2, 1000)
    m *= 100.0
    m[:2] = torch.tensor([-1e5, 1e5])
    d[2:4] = 0.0
    (e,) = run_factors(kernel, dots, d, m)
    assert e.isfinite().all()
    assert relative_error(e, row_factors(dots.double().sum(0), d, m, EPS)[1]) <= 1e-5
    d[7] = torch.nan  # shows in log2 w
    dots[1, 9] = torch.nan
    m.fill_(100.0)
    assert run_factors(kernel, dots, d, m).isnan().nonzero().tolist() == [[0, 9]]


@pytest.mark.sanitize
def test_small(kernel: ModuleType) -> None:
    """For compute-sanitizer."""
    for dim in (48, 272):
        dh, h, d, m = draw_rows((1, 2, 70), dim, torch.float16)
        truth = row_factors_of_parts(dh, h, d, m)
        assert_factors(run_rows(kernel, dh, h, d, m), truth)
    dots, d, m = draw_dots(2, 300)
    truth = row_factors(dots.double().sum(0), d, m, EPS)[1]
    assert relative_error(run_factors(kernel, dots, d, m)[0], truth) <= 1e-5
