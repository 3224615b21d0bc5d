"""The small kernels around the passes of the mLSTM backward on the GPU, against their formulas in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tfla_tk import build, ops
from tfla_tk.backends.tk import Operands, _current_stream, _gate, _operand, _pointer
from tfla_tk.backends.tk_passes import PART_COLUMNS
from tfla_tk.build import instances

from .memory import uninitialised_memory_is_nan

Formulas = Callable[..., Any]
Error = Callable[[Tensor, Tensor], float]
StateGradient = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # c, dc, n, dn

EPS = 1e-6
REPEATS = 200
CHUNK = 64
ANCHOR_CHUNKS = 8
GATES = ["exp", "sig"]
NO_STATE: StateGradient = (None, None, None, None)


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return build.load(instances.mlstm_bwd())


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype, device="cuda")


# rows


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
    kernel.mlstm_bwd_rows(
        _operand(dh),
        _operand(h),
        (_pointer(d), _pointer(m)),
        (log2_w.data_ptr(), e.data_ptr(), e.stride(0)),
        (*h.shape, part_columns),
        EPS,
        h.dtype == torch.float16,
        device,
        _current_stream(device),
    )
    assert e[:, d.numel() :].isnan().all()
    return log2_w, e[:, : d.numel()].unflatten(1, d.shape)


def row_factors_of_parts(
    row_factors: Formulas,
    dh: Tensor,
    h: Tensor,
    d: Tensor,
    m: Tensor | None,
    part_columns: int = PART_COLUMNS,
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
) -> tuple[Tensor, Tensor]:
    """log2 w, and e of every part of V, [parts, rows], with nothing written behind their last row."""
    slices, rows = dots.shape
    parts = max(1, -(-slices // part_slices))
    wide = torch.full((1 + parts, rows + 1000), torch.nan, device="cuda")
    device = dots.get_device()
    kernel.mlstm_bwd_factors(
        (dots.data_ptr(), dots.stride(0), slices, part_slices),
        (_pointer(d), _pointer(m)),
        (wide[0].data_ptr(), wide[1].data_ptr(), wide.stride(0)),
        rows,
        EPS,
        device,
        _current_stream(device),
    )
    assert wide[:, rows:].isnan().all()
    return wide[0, :rows], wide[1:, :rows]


def assert_factors(found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], rel_err: Error) -> None:
    torch.testing.assert_close(found[0].double(), truth[0], rtol=1e-6, atol=3e-6)
    assert rel_err(found[1], truth[1]) <= 1e-5


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
    row_factors: Formulas,
    rel_err: Error,
) -> None:
    dh, h, d, m = draw_rows(size, dim, dtype)
    if layout == "transposed":
        dh, h = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dh, h))
    for given in (m, None):
        found = run_rows(kernel, dh, h, d, given, part_columns)
        truth = row_factors_of_parts(row_factors, dh, h, d, given, part_columns)
        assert_factors(found, truth, rel_err)


def test_row_factors_at_the_ends_of_the_range(
    kernel: ModuleType, row_factors: Formulas, rel_err: Error
) -> None:
    """e^{-m} is inf below -88.7 and 0 above 103; log2 w stays finite, and NaN shows."""
    dh, h, d, m = draw_rows((1, 2, 500), 256, torch.bfloat16)
    m *= 100.0
    m[0, 0, :2] = torch.tensor([-1e5, 1e5])
    d[0, 0, 2:4] = 0.0
    log2_w, e = run_rows(kernel, dh, h, d, m)
    assert log2_w.isfinite().all() and e.isfinite().all()
    assert_factors((log2_w, e), row_factors_of_parts(row_factors, dh, h, d, m), rel_err)
    d[0, 1, 7] = torch.nan
    dh[0, 1, 9, 200] = torch.nan
    m.fill_(100.0)
    log2_w, e = run_rows(kernel, dh, h, d, m)
    assert log2_w.isnan().nonzero().tolist() == [[0, 1, 7]]
    assert e.isnan().nonzero().tolist() == [[0, 0, 1, 9]]


@pytest.mark.parametrize("rows", [1, 63, 3 * 1000])
@pytest.mark.parametrize("slices", [0, 1, 2, 4])
@pytest.mark.parametrize("part_slices", [1, 2, 4])
def test_row_factors_from_dots(
    part_slices: int, slices: int, rows: int, kernel: ModuleType, row_factors: Formulas, rel_err: Error
) -> None:
    """Without dots e is 0."""
    dots, d, m = draw_dots(slices, rows)
    of_parts = [part.double().sum(0) for part in dots.split(part_slices)] if slices else [torch.zeros_like(d)]
    for given in (m, None):
        log2_w, e = zip(*(row_factors(part, d, given, EPS) for part in of_parts), strict=True)
        truth = log2_w[0], torch.stack(e)
        assert truth[1].any() == (slices > 0)
        assert_factors(run_factors(kernel, dots, d, given, part_slices), truth, rel_err)


def test_row_factors_from_dots_at_the_ends_of_the_range(
    kernel: ModuleType, row_factors: Formulas, rel_err: Error
) -> None:
    """As those from dh and h."""
    dots, d, m = draw_dots(2, 1000)
    m *= 100.0
    m[:2] = torch.tensor([-1e5, 1e5])
    d[2:4] = 0.0
    log2_w, e = run_factors(kernel, dots, d, m)
    assert log2_w.isfinite().all() and e.isfinite().all()
    assert_factors((log2_w, e[0]), row_factors(dots.double().sum(0), d, m, EPS), rel_err)
    d[7] = torch.nan
    dots[1, 9] = torch.nan
    m.fill_(100.0)
    log2_w, e = run_factors(kernel, dots, d, m)
    assert log2_w.isnan().nonzero().tolist() == [[7]]
    assert e.isnan().nonzero().tolist() == [[0, 9]]


def floats_at(pointer: int, shape: tuple[int, int], stride: int) -> Tensor:
    """A copy of what lies at an address, its rows a stride apart."""
    interface = {
        "data": (pointer, False),
        "shape": shape,
        "strides": (4 * stride, 4),
        "typestr": "<f4",
        "version": 2,
    }
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda").clone()


@pytest.fixture
def dots_read(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The dots [slices, rows] that every launch of mlstm_bwd_factors reads."""
    found: list[Tensor] = []
    launch = kernel.mlstm_bwd_factors

    def record(dots: tuple[int, int, int, int], rows: Any, factors: Any, count: int, *others: Any) -> None:
        pointer, stride, slices, _ = dots
        if slices > 0:
            found.append(floats_at(pointer, (slices, count), stride))
        launch(dots, rows, factors, count, *others)

    monkeypatch.setattr(kernel, "mlstm_bwd_factors", record)
    return found


@pytest.mark.parametrize(
    "dims",
    [*instances.PASS_TILES, (48, 80), (208, 176), (80, 272), (144, 272), (256, 512)],
    ids="{0[0]}_{0[1]}".format,
)
@pytest.mark.parametrize("lengths", [None, [200, 0, 1, 64, 63, 65, 450]], ids=["batch", "packed"])
def test_the_pass_for_dv_leaves_the_dots(
    lengths: list[int] | None,
    dims: tuple[int, int],
    dtype: torch.dtype,
    exponential: Any,
    make_inputs: Callable[..., Any],
    draw_packed: Callable[..., Any],
    cut_every: Callable[[int], None],
    dots_read: list[Tensor],
    rel_err: Error,
) -> None:
    """By its slices of V, of every token, all of them read by one launch."""
    cut_every(10_000)
    if lengths is None:
        x = make_inputs(2, 3, 300, dims, dtype)
    else:
        x = draw_packed(exponential, lengths, dims, dtype)
    dh = exponential.draw_cotangents(x, last=False)["h"]
    x["v"].requires_grad_()
    h = exponential(x)
    with uninitialised_memory_is_nan():
        torch.autograd.grad(h, x["v"], dh)
    width = int(dict(instances.mlstm_pass("dv", *dims).defines)["TFLA_SLICE"])
    slices = zip(dh.split(width, dim=-1), h.detach().split(width, dim=-1), strict=True)
    expected = torch.stack([sum_products(*of_slice).flatten() for of_slice in slices])
    (found,) = dots_read
    assert rel_err(found, expected) <= 1e-5


# gates


class RowSums(NamedTuple):
    """Of every token [slices, B, NH, S], and of every chunk with the squares [slices, B, NH, slots, 2]."""

    whole: Tensor
    inter: Tensor


class Problem(NamedTuple):
    """Arguments of the gates' kernels. states: c, dc, n, dn at start and end, None where absent."""

    q_dq: RowSums
    k_dk: RowSums
    anchors: Tensor
    i: Tensor
    f: Tensor
    chunk_m: Tensor | None
    cu_seqlens: Tensor | None
    states: tuple[StateGradient, StateGradient]
    dims: tuple[int, int]

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return bounds_of(self.i, self.cu_seqlens)


def bounds_of(i: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int]]:
    """(start, end) of every sequence."""
    return [(0, i.shape[-1])] if cu_seqlens is None else list(itertools.pairwise(cu_seqlens.tolist()))


def draw_anchors(i: Tensor, cu_seqlens: Tensor | None, parts: int) -> Tensor:
    """Flows of the size of the row sums between them; what belongs to no anchor is not a number."""
    slots = ops.chunk_slots(i.shape[-1], cu_seqlens) // ANCHOR_CHUNKS + 1
    drawn = 20 * parts**-0.5 * normal(*i.shape[:2], slots, parts, seed=8)
    found = torch.full_like(drawn, torch.nan)
    for sequence, (start, end) in enumerate(bounds_of(i, cu_seqlens)):
        first = 0 if cu_seqlens is None else start // CHUNK + sequence
        for chunk in range(ANCHOR_CHUNKS, -(-(end - start) // CHUNK), ANCHOR_CHUNKS):
            slot = (first + chunk) // ANCHOR_CHUNKS
            found[:, :, slot] = drawn[:, :, slot]
    return found


def draw_gates(
    gate: str,
    size: tuple[int, int, int],
    *,
    slices: int = 1,
    parts: int = 5,
    lengths: list[int] | None = None,
    states: bool = False,
    dims: tuple[int, int] = (16, 48),
    forget_bias: float = 3.0,
) -> Problem:
    """Row sums of any values: the formulas do not ask where they come from."""
    cu_seqlens = None
    if lengths is not None:
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    count = size[0] if lengths is None else len(lengths)
    slots = ops.chunk_slots(size[-1], cu_seqlens)

    def row_sums(seed: int) -> RowSums:
        inter = normal(slices, *size[:2], slots, 2, seed=seed + 1)
        inter[..., 1] = 64 * inter[..., 1].square()  # of the squares
        return RowSums(normal(slices, *size, seed=seed), inter)

    sums = [row_sums(seed) for seed in (1, 3)]
    chunk_m = 3 * normal(*size[:2], slots, dtype=torch.float64, seed=5) if gate == "exp" else None

    def state(seed: int) -> StateGradient:
        if not states:
            return NO_STATE
        c, n = (count, size[1], *dims), (count, size[1], dims[0])
        return (
            normal(*c, seed=seed),
            normal(*c, seed=seed + 1),
            normal(*n, seed=seed + 2),
            normal(*n, seed=seed + 3),
        )

    i, f = normal(*size, seed=6), normal(*size, seed=7) + forget_bias
    anchors = draw_anchors(i, cu_seqlens, parts)
    return Problem(*sums, anchors, i, f, chunk_m, cu_seqlens, (state(10), state(20)), dims)


def run(kernel: ModuleType, x: Problem) -> tuple[Tensor, Tensor]:
    di, df = (torch.full_like(gate, torch.nan) for gate in (x.i, x.f))
    batch, heads, _ = x.i.shape
    operands = Operands()
    offsets = operands.offsets(x.cu_seqlens, batch)
    size = kernel.mlstm_bwd_gates_workspace_bytes(heads, offsets[-1])
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    device = x.i.get_device()
    kernel.mlstm_bwd_gates(
        *((sums.whole.data_ptr(), sums.inter.data_ptr(), len(sums.whole)) for sums in (x.q_dq, x.k_dk)),
        (x.anchors.data_ptr(), x.anchors.shape[-1]),
        *(_gate(gate) for gate in (x.i, x.f, di, df)),
        _pointer(x.chunk_m),
        *(tuple(_pointer(t) for t in state) for state in x.states),
        workspace.data_ptr(),
        offsets,
        (*x.i.shape, *x.dims),
        x.chunk_m is None,
        device,
        _current_stream(device),
    )
    return di, df


def truth(x: Problem, gate_gradients: Formulas) -> tuple[Tensor, Tensor]:
    count = x.i.shape[0] if x.cu_seqlens is None else len(x.bounds)
    flows = []
    for c, dc, n, dn in x.states:
        flow = torch.zeros(count, x.i.shape[1], dtype=torch.float64, device="cuda")
        for state, grad in ((c, dc), (n, dn)):
            if state is not None and grad is not None:
                flow += (state.double() * grad.double()).flatten(2).sum(-1)
        flows.append(flow)
    sums = [[t.double().sum(0) for t in (own.whole, own.inter)] for own in (x.q_dq, x.k_dk)]
    found: tuple[Tensor, Tensor] = gate_gradients(*sums, x.anchors, x.i, x.f, x.chunk_m, flows, x.bounds)
    return found


def assert_gradients(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], rel_err: Error, tolerance: float = 1e-5
) -> None:
    for name, x, y in zip(("di", "df"), found, expected, strict=True):
        assert rel_err(x, y) <= tolerance, name


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("slices", "parts"), [(1, 1), (3, 5), (2, 70)])
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("seq", [1, 63, 64, 65, 512, 513, 1024, 5000])
def test_gate_gradients(
    gate: str,
    seq: int,
    states: bool,
    slices: int,
    parts: int,
    kernel: ModuleType,
    gate_gradients: Formulas,
    rel_err: Error,
) -> None:
    x = draw_gates(gate, (2, 3, seq), slices=slices, parts=parts, states=states)
    assert_gradients(run(kernel, x), truth(x, gate_gradients), rel_err)


@pytest.mark.parametrize("forget_bias", [-8.0, 0.0, 1.0, 12.0])
@pytest.mark.parametrize("gate", GATES)
def test_chunks_that_forget_and_that_do_not(
    gate: str, forget_bias: float, kernel: ModuleType, gate_gradients: Formulas, rel_err: Error
) -> None:
    x = draw_gates(gate, (2, 3, 3000), states=True, forget_bias=forget_bias)
    assert_gradients(run(kernel, x), truth(x, gate_gradients), rel_err)


def test_a_long_sequence(kernel: ModuleType, gate_gradients: Formulas, rel_err: Error) -> None:
    x = draw_gates("exp", (1, 2, 140_000), states=True)
    assert_gradients(run(kernel, x), truth(x, gate_gradients), rel_err)


LENGTHS = [200, 0, 1, 64, 63, 65, 0, 450, 1280]
LONG = [513, 0, 575, 512, 1090] * 8  # with an anchor in nearly every slot


@pytest.mark.parametrize(
    "lengths", [LENGTHS, [(7 * n) % 90 for n in range(100)], LONG], ids=["few", "many", "long"]
)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("wide", [False, True])
def test_packed_sequences(
    wide: bool,
    gate: str,
    lengths: list[int],
    kernel: ModuleType,
    gate_gradients: Formulas,
    rel_err: Error,
) -> None:
    x = draw_gates(gate, (1, 3, sum(lengths)), lengths=lengths, states=True)
    assert x.cu_seqlens is not None
    if wide:
        x = x._replace(cu_seqlens=x.cu_seqlens.long())
    assert_gradients(run(kernel, x), truth(x, gate_gradients), rel_err)


@pytest.mark.parametrize("missing", ["c", "n"])
@pytest.mark.parametrize("end", [0, 1], ids=["initial", "last"])
def test_part_of_the_states(
    end: int, missing: str, kernel: ModuleType, gate_gradients: Formulas, rel_err: Error
) -> None:
    x = draw_gates("exp", (2, 3, 300), states=True, dims=(256, 512))
    c, dc, n, dn = x.states[end]
    kept = (None, None, n, dn) if missing == "c" else (c, dc, None, None)
    x = x._replace(states=(kept, NO_STATE) if end == 0 else (NO_STATE, kept))
    assert_gradients(run(kernel, x), truth(x, gate_gradients), rel_err)


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gates_of_any_dtype_and_strides(
    gate_dtype: torch.dtype, kernel: ModuleType, gate_gradients: Formulas, rel_err: Error
) -> None:
    x = draw_gates("sig", (2, 3, 300))
    i = x.i.to(gate_dtype).transpose(1, 2).contiguous().transpose(1, 2)
    f = x.f.to(gate_dtype).repeat_interleave(2, dim=-1)[..., ::2]
    x = x._replace(i=i, f=f)
    found = run(kernel, x)
    assert [t.dtype for t in found] == [gate_dtype] * 2
    tolerance = max(1e-5, torch.finfo(gate_dtype).eps)
    assert_gradients(found, truth(x, gate_gradients), rel_err, tolerance)


@pytest.mark.parametrize("gate", GATES)
def test_extreme_gates(gate: str, kernel: ModuleType, gate_gradients: Formulas, rel_err: Error) -> None:
    x = draw_gates(gate, (1, 2, 700), states=True)
    x.f[..., ::90] = -torch.inf
    x.f[..., 5::70] = 1e4
    x.f[..., 6::71] = -1e4
    x.i[..., 3::7] = -torch.inf
    x.i[..., 200:300] = 1e4
    found = run(kernel, x)
    assert all(t.isfinite().all() for t in found)
    assert_gradients(found, truth(x, gate_gradients), rel_err)


def test_noise_does_not_pass_a_chunk_that_forgets(kernel: ModuleType) -> None:
    x = draw_gates("exp", (1, 2, 6 * 64))
    x.f[..., 64 + 5] = x.f[..., 4 * 64 + 5] = -60.0
    before = run(kernel, x)[1][..., 64 : 5 * 64]
    for sums in (x.q_dq, x.k_dk):
        sums.whole[..., :CHUNK] += 100.0
        sums.whole[..., 5 * CHUNK :] += 100.0
        sums.inter[..., [0, 5], :] += 100.0
    assert torch.equal(run(kernel, x)[1][..., 64 : 5 * 64], before)


def test_noise_does_not_pass_an_anchor(kernel: ModuleType) -> None:
    tokens = ANCHOR_CHUNKS * CHUNK
    x = draw_gates("exp", (1, 2, 3 * tokens), states=True)
    before = run(kernel, x)[1][..., tokens : 2 * tokens]
    for sums in (x.q_dq, x.k_dk):
        sums.whole[..., :tokens] = torch.nan
        sums.whole[..., 2 * tokens :] = torch.nan
        sums.inter[..., :ANCHOR_CHUNKS, :] = torch.nan
        sums.inter[..., 2 * ANCHOR_CHUNKS :, :] = torch.nan
    assert torch.equal(run(kernel, x)[1][..., tokens : 2 * tokens], before)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["batch", "packed"])
def test_repeats_are_bitwise_equal(lengths: list[int] | None, kernel: ModuleType) -> None:
    seq = 2000 if lengths is None else sum(lengths)
    x = draw_gates("exp", (1, 16, seq), slices=2, lengths=lengths, states=True)
    first = run(kernel, x)
    for _ in range(REPEATS):
        assert all(torch.equal(a, b) for a, b in zip(run(kernel, x), first, strict=True))


@pytest.mark.sanitize
@pytest.mark.parametrize("lengths", [None, [70, 0, 1, 63], [513, 70]], ids=["batch", "packed", "long"])
def test_small(
    lengths: list[int] | None,
    kernel: ModuleType,
    gate_gradients: Formulas,
    row_factors: Formulas,
    rel_err: Error,
) -> None:
    """For compute-sanitizer."""
    seq = 1030 if lengths is None else sum(lengths)
    x = draw_gates("exp", (1, 2, seq), slices=2, lengths=lengths, states=True)
    assert_gradients(run(kernel, x), truth(x, gate_gradients), rel_err)
    for dim in (48, 272):
        dh, h, d, m = draw_rows((1, 2, 70), dim, torch.float16)
        found = run_rows(kernel, dh, h, d, m)
        assert_factors(found, row_factors(sum_products(dh, h), d, m, EPS), rel_err)
    dots, d, m = draw_dots(2, 300)
    found = run_factors(kernel, dots, d, m)
    assert_factors(found, row_factors(dots.double().sum(0), d, m, EPS), rel_err)
