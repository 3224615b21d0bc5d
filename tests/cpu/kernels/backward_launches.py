"""Records what the backward's host side hands to its kernels, and draws the arguments of such calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tfla_tk.build import Instance
from tfla_tk.build.instances import mlstm_bwd

from .addresses import boundary_slots, chunk_slots, slices_of, states_at, tensor_at
from .backward_emulation import BackwardModules

B, NH, S, K, V = 2, 3, 150, 80, 256
SLICES = 1  # of K, in the walks for dq and dk
PART = 256  # columns of V that a share of a walk takes for keys
ANCHOR_BYTES = 1000
CHUNK_GATES = 10  # floats
EPS = 1e-6


def parts_of(dim_v: int) -> int:
    return -(-dim_v // PART)


def flow_parts(dim_keys: int, dim_values: int) -> int:
    return 3 * parts_of(dim_keys)


def e_at(e: int, e_stride: int, count: int, parts: int) -> list[Tensor]:
    """Of every part of V."""
    return [tensor_at(e + 4 * part * e_stride, torch.float32, (count,)) for part in range(parts)]


def gates_at(gates: int, offsets: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """Of all chunks."""
    batch, heads, seq = size
    count = CHUNK_GATES * batch * heads * chunk_slots(offsets, seq)
    return tensor_at(gates, torch.float32, (count,))


class Launches(BackwardModules, list[SimpleNamespace]):
    """Stands for the kernels' modules and records their launches.

    A walk writes WRITTEN into each of its outputs; of the gradient of n, one for each part of V. The segments
    kernel of a gradient writes OWN[gradient] into its boundaries, into n that of each part and its number,
    and the combine adds CARRIED to all of them. What a walk reads of states is recorded as it was then:
    `entering_c`, `boundary_c`, `boundary_n`. The walk for dv numbers the dots that it writes, slice by slice:
    `dots`, and `dots_read` where e is made of them. The kernels for rows and chunks number their launches in
    what they write, in e by parts: `gates_read`, `log2_w_read` and `e_read` by those that read it, none where
    they get none.
    """

    WRITTEN, CARRIED, OWN = 3.0, 100.0, (0.0, 10.0)

    def __init__(self) -> None:
        super().__init__()
        self.anchor_sizes: list[tuple[int, ...]] = []  # that anchor_bytes was asked for

    def module_sizes(self, instance: Instance) -> dict[str, Callable[..., int]]:
        if instance == mlstm_bwd():
            return {
                "mlstm_bwd_gates_workspace_bytes": lambda heads, sequences: 128 * heads * sequences,
                "chunk_gates_bytes": lambda: 4 * CHUNK_GATES,
            }
        return {"anchor_bytes": self.anchor_bytes, "flow_parts": flow_parts}

    def anchor_bytes(self, *sizes: int) -> int:
        self.anchor_sizes.append(sizes)
        return ANCHOR_BYTES

    def mlstm_bwd_scan(self, launch: SimpleNamespace) -> None:
        launch.number = float(len(self))
        gates_at(launch.gates, launch.offsets, launch.sizes).fill_(launch.number)
        self.record("scan", launch)

    def mlstm_bwd_rows(self, launch: SimpleNamespace) -> None:
        self.write_factors(launch, math.prod(launch.sizes[:3]), parts_of(launch.sizes[3]))
        self.record("rows", launch)

    def mlstm_bwd_factors(self, launch: SimpleNamespace) -> None:
        pointer, stride, slices, part_slices = launch.dots
        launch.dots_read = [
            tensor_at(pointer + 4 * stride * number, torch.float32, (launch.count,)).clone()
            for number in range(slices)
        ]
        self.write_factors(launch, launch.count, -(-slices // part_slices))
        self.record("factors", launch)

    def write_factors(self, launch: SimpleNamespace, count: int, parts: int) -> None:
        launch.number = float(len(self))
        log2_w, e, e_stride = launch.factors
        if log2_w:
            tensor_at(log2_w, torch.float32, (count,)).fill_(launch.number)
        for part, of_part in enumerate(e_at(e, e_stride, count, parts)):
            of_part.fill_(launch.number + part / 8)

    @staticmethod
    def read_e(launch: SimpleNamespace, e: int, e_stride: int) -> None:
        *size, dim_keys, _ = launch.sizes
        parts = 0 if launch.gradient == 2 or e == 0 else parts_of(dim_keys)
        launch.e_read = [x.clone() for x in e_at(e, e_stride, math.prod(size), parts)]

    def mlstm_bwd_gates(self, launch: SimpleNamespace) -> None:
        self.record("gates", launch)

    def mlstm_bwd_combine(self, launch: SimpleNamespace) -> None:
        c, n, _ = launch.boundaries
        heads, _, dim_qk, dim_v = launch.sizes
        _, _, sequences, segments, _ = launch.cut
        slots = heads * (segments - sequences)
        tensor_at(c, torch.float32, (slots, dim_qk, dim_v)).add_(self.CARRIED)
        tensor_at(n, torch.float32, (launch.norm_parts, slots, dim_qk)).add_(self.CARRIED)
        self.record("combine", launch)

    def mlstm_pass_segments(self, launch: SimpleNamespace) -> None:
        own, slots = self.OWN[launch.gradient], boundary_slots(launch)
        c, _ = states_at((launch.boundaries[0], 0), (slots,), launch, torch.float32)
        c.fill_(own)
        for part, n in enumerate(self.boundary_n(launch)):
            n.fill_(own + part)
        tensor_at(launch.boundaries[2], torch.float64, (slots,)).fill_(-1.0)
        log2_w, e, e_stride, _ = launch.rows
        self.read_e(launch, e, e_stride)
        count = math.prod(launch.sizes[:3]) if log2_w else 0
        launch.log2_w_read = tensor_at(log2_w, torch.float32, (count,)).clone() if count else torch.empty(0)
        self.record(("segments_dq", "segments_dk")[launch.gradient], launch)

    @staticmethod
    def boundary_n(launch: SimpleNamespace) -> Tensor:
        """n at the boundaries, of dk for each part of V: [parts, slots, K]; none without an address."""
        *_, dim_keys, dim_values = launch.sizes
        parts = parts_of(dim_keys) if launch.gradient == 1 else 1
        shape = (parts, boundary_slots(launch), dim_values)
        n = launch.boundaries[1]
        return tensor_at(n, torch.float32, shape) if n else torch.empty(0)

    def mlstm_pass(self, launch: SimpleNamespace) -> None:
        name = ("dq", "dk", "dv")[launch.gradient]
        batch, heads, seq, dim_keys, dim_values = launch.sizes
        count = (launch.cut[2], heads)
        launch.entering_c, launch.entering_n, launch.boundary_c = (
            None if x is None else x.clone()
            for x in (
                *states_at(launch.entering, count, launch, torch.float32),
                states_at(launch.boundaries[:2], (boundary_slots(launch),), launch, torch.float32)[0],
            )
        )
        launch.boundary_n = self.boundary_n(launch).clone()
        c, n = launch.leaving
        if c:
            states_at((c, 0), count, launch, torch.float32)[0].fill_(self.WRITTEN)
        if n:
            tensor_at(n, torch.float32, (parts_of(dim_keys), *count, dim_values)).fill_(self.WRITTEN)
        pointer, *strides = launch.out
        dtype = torch.float16 if launch.half else torch.bfloat16
        tensor_at(pointer, dtype, (batch, heads, seq, dim_values), *strides, 1).fill_(self.WRITTEN)
        gates, e, e_stride = launch.gates
        self.read_e(launch, e, e_stride)
        launch.gates_read = gates_at(gates, launch.cut, launch.sizes[:3]).clone()
        if name == "dv" and launch.sums[0]:
            dots = tensor_at(launch.sums[0], torch.float32, (slices_of(launch)[1], batch * heads * seq))
            launch.dots = torch.arange(float(dots.numel())).view_as(dots)
            dots.copy_(launch.dots)
        self.record(name, launch)

    def record(self, name: str, launch: SimpleNamespace) -> None:
        launch.name = name
        self.append(launch)

    def of(self, *names: str) -> list[SimpleNamespace]:
        return [launch for launch in self if launch.name in names]

    @property
    def walks(self) -> list[SimpleNamespace]:
        return self.of("dq", "dk", "dv")


def memory_of(x: SimpleNamespace) -> set[tuple[int, int]]:
    """What a launch takes of the memory between kernels: address and bytes."""
    if x.name in ("rows", "factors"):
        log2_w, e, e_stride = x.factors
        if x.name == "factors":
            return {(e, 4 * e_stride * -(-x.dots[2] // x.dots[3]))}
        # of the parts, each aligned
        return {(log2_w, 4 * math.prod(x.sizes[:3])), (e, 4 * e_stride * parts_of(x.sizes[3]))}
    if x.name == "scan":
        batch, heads, seq = x.sizes
        gates = (x.gates, 4 * CHUNK_GATES * batch * heads * chunk_slots(x.offsets, seq))
        return {gates, (x.tickets, 8)} if x.tickets else {gates}
    if x.name == "dv" and x.sums[0]:
        return {(x.sums[0], 4 * slices_of(x)[1] * math.prod(x.sizes[:3]))}
    if x.name == "combine":
        slots = (x.cut[3] - x.cut[2]) * x.sizes[0]
        dim_qk, dim_v = x.sizes[2:]
        sizes = (4 * slots * dim_qk * dim_v, 4 * x.norm_parts * slots * dim_qk, 8 * slots)
        return set(zip(x.boundaries, sizes, strict=True))
    if x.name == "dq":
        return {(x.anchors[0], ANCHOR_BYTES)}
    if x.name != "gates":
        return set()
    batch, heads, seq, *_ = x.sizes
    slots = chunk_slots(x.offsets, seq)
    found = {(x.workspace, 128 * heads * x.offsets[2])}
    for whole, inter, count in (x.q_dq, x.k_dk):
        found |= {(whole, 4 * count * batch * heads * seq), (inter, 8 * count * batch * heads * slots)}
    flows, _, parts, chunks = x.anchors
    return found | {(flows, 4 * batch * heads * (slots // chunks + 1) * parts)}


NAMES = (
    *("q", "k", "v", "i", "f", "c_initial", "n_initial", "m_initial", "offsets", "h"),
    *("row_n", "row_m", "chunk_m", "c_last", "n_last", "dh", "dc_last", "dn_last"),
)
GATES = ["exp", "sig", "sig_unnormalised"]


def draw(
    gate: str,
    packed: bool = False,
    gate_dtype: torch.dtype = torch.float32,
    *,
    dtype: torch.dtype = torch.bfloat16,
    dim_qk: int = K,
    dim_v: int = V,
) -> tuple[Any, ...]:
    """Arguments of the backward op, its states all given."""
    count, size = (5, (1, NH, B * S)) if packed else (B, (B, NH, S))
    q, k = (torch.randn(*size, dim_qk, dtype=dtype) for _ in "qk")
    v = torch.randn(*size, dim_v, dtype=dtype)
    i, f = (torch.randn(size, dtype=gate_dtype) for _ in "if")
    offsets = torch.tensor([0, 70, 70, 134, 135, B * S]) if packed else None
    normalize = gate != "sig_unnormalised"
    c = torch.randn(count, NH, dim_qk, dim_v)
    n = torch.randn(count, NH, dim_qk) if normalize else None
    m = torch.randn(count, NH, 1) if gate == "exp" else None
    tensors = (q, k, v, i, f, c, n, m, offsets)
    options = (gate != "exp", normalize, EPS)
    h, c, n, _, *rows = torch.ops.tfla_tk.mlstm_fwd(*tensors, *options, True, True)
    return (*tensors, h, *rows, c, n, *(torch.randn_like(x) for x in (h, c, n)), *options, False)


def named(given: tuple[Any, ...]) -> SimpleNamespace:
    return SimpleNamespace(**dict(zip(NAMES, given, strict=False)))


def pointer(x: Tensor | None, wanted: bool = True) -> int:
    return x.data_ptr() if wanted and x is not None else 0


def operand(x: Tensor) -> tuple[int, ...]:
    """Address and strides of B, NH, S; of B any multiple of 8 where there is one row of it."""
    return x.data_ptr(), 8 if x.shape[0] == 1 else x.stride(0), *x.stride()[1:3]


def assert_e_from(reader: SimpleNamespace, writer: SimpleNamespace | None) -> None:
    """That a walk, or its segments kernel, has read e of every part of V as this launch wrote it; or none.

    "dv" reads none.
    """
    e = reader.e_read
    assert len(e) == (0 if reader.name == "dv" or writer is None else parts_of(reader.sizes[3]))
    assert all((x == writer.number + part / 8).all() for part, x in enumerate(e))


def assert_gates_from(reader: SimpleNamespace, scan: SimpleNamespace, writer: SimpleNamespace | None) -> None:
    """That a walk is given what these launches wrote of chunks and of e, and has read it."""
    assert reader.gates == (scan.gates, *((0, 0) if writer is None else writer.factors[1:]))
    assert (reader.gates_read == scan.number).all()
    assert_e_from(reader, writer)


def transposed(x: Tensor) -> Tensor:
    """The same numbers with heads and tokens swapped in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
