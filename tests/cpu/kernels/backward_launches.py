"""Records what tk_backward.mlstm_bwd hands to its kernels, and draws the arguments of such calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tfla_tk.build import Instance
from tfla_tk.build.instances import mlstm_bwd

from .backward_emulation import BackwardModules, slices_of, states_at, tensor_at

B, NH, S, K, V = 2, 3, 150, 80, 256
PANELS = 2  # of 64 columns of K
PART = 256  # columns of V that a pass takes for keys
CHUNK = 64
EPS = 1e-6


def flow_parts(instance: Instance) -> int:
    """Of the tiles of the keys, so that the parts of V have different ones."""
    return int(dict(instance.defines)["TFLA_DIM_KEYS"]) // 64


class Launches(BackwardModules, list[SimpleNamespace]):
    """Stands for the kernels' modules and records their launches.

    A pass writes WRITTEN into each of its outputs, and twice that where it is the second of its gradient. The
    n-th segments kernel of a gradient writes its own number, `own`, into its boundaries, and the combine adds
    CARRIED to all of them. What a pass reads of states is recorded as it was then: `entering_c`,
    `boundary_c`, `boundary_n`. The pass for dv numbers the dots that it writes, slice by slice: `dots`, and
    `dots_read` where the factors are made of them. Both kernels that make factors number their launches, in
    what they write: `factors_read` by the passes, none where they get none.
    """

    WRITTEN, CARRIED = 3.0, 100.0

    def __init__(self) -> None:
        super().__init__()
        self.anchor_sizes: list[tuple[int, ...]] = []  # that anchor_bytes was asked for

    @staticmethod
    def own(gradient: int, number: int) -> float:
        return 10.0 * gradient + number

    def module_sizes(self, instance: Instance) -> dict[str, Callable[..., int]]:
        if instance == mlstm_bwd():
            return {"mlstm_bwd_gates_workspace_bytes": lambda heads, sequences: 128 * heads * sequences}
        return {
            "anchor_bytes": lambda *sizes: self.anchor_bytes(instance, *sizes),
            "flow_parts": lambda dim_values: flow_parts(instance),
        }

    def anchor_bytes(self, instance: Instance, *sizes: int) -> int:
        self.anchor_sizes.append(sizes)
        return 1000 * flow_parts(instance)

    def mlstm_bwd_rows(self, launch: SimpleNamespace) -> None:
        self.write_factors(launch, math.prod(launch.sizes[:3]))
        self.record("rows", launch)

    def mlstm_bwd_factors(self, launch: SimpleNamespace) -> None:
        pointer, stride, slices = launch.dots
        launch.dots_read = [
            tensor_at(pointer + 4 * stride * number, torch.float32, (launch.count,)).clone()
            for number in range(slices)
        ]
        self.write_factors(launch, launch.count)
        self.record("factors", launch)

    def write_factors(self, launch: SimpleNamespace, count: int) -> None:
        launch.number = float(len(self))
        for pointer in launch.factors:
            tensor_at(pointer, torch.float32, (count,)).fill_(launch.number)

    @staticmethod
    def read_factors(launch: SimpleNamespace) -> None:
        launch.factors_read = [
            tensor_at(pointer, torch.float32, (math.prod(launch.sizes[:3]),)).clone()
            for pointer in launch.rows[:2]
            if pointer
        ]

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
        name = ("segments_dq", "segments_dk")[launch.gradient]
        launch.own = self.own(launch.gradient, len(self.of(name)))
        slots = self.slots(launch)
        for x in states_at(launch.boundaries[:2], (slots,), launch, torch.float32):
            if x is not None:
                x.fill_(launch.own)
        tensor_at(launch.boundaries[2], torch.float64, (slots,)).fill_(-1.0)
        self.read_factors(launch)
        self.record(name, launch)

    @staticmethod
    def slots(launch: SimpleNamespace) -> int:
        _, _, sequences, segments, _ = launch.cut
        return int((segments - sequences) * launch.sizes[1])

    def mlstm_pass(self, launch: SimpleNamespace) -> None:
        name = ("dq", "dk", "dv")[launch.gradient]
        batch, heads, seq, _, dim_values, _ = launch.sizes
        count = (launch.cut[2], heads)
        launch.entering_c, launch.entering_n, launch.boundary_c, launch.boundary_n = (
            None if x is None else x.clone()
            for x in (
                *states_at(launch.entering, count, launch, torch.float32),
                *states_at(launch.boundaries[:2], (self.slots(launch),), launch, torch.float32),
            )
        )
        written = self.WRITTEN * (1 + len(self.of(name)))
        for x in states_at(launch.leaving, count, launch, torch.float32):
            if x is not None:
                x.fill_(written)
        pointer, *strides = launch.out
        dtype = torch.float16 if launch.half else torch.bfloat16
        out = tensor_at(pointer, dtype, (batch, heads, seq, dim_values), *strides, 1)
        out.copy_(out + written if launch.accumulate else torch.full_like(out, written))
        self.read_factors(launch)
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
    def passes(self) -> list[SimpleNamespace]:
        return self.of("dq", "dk", "dv")


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
    h, c, n, _, *rows = torch.ops.tfla_tk.mlstm_fwd(*tensors, *options, True, True, "auto")
    return (*tensors, h, *rows, c, n, *(torch.randn_like(x) for x in (h, c, n)), *options, "auto")


def named(given: tuple[Any, ...]) -> SimpleNamespace:
    return SimpleNamespace(**dict(zip(NAMES, given, strict=False)))


def pointer(x: Tensor | None, wanted: bool = True) -> int:
    return x.data_ptr() if wanted and x is not None else 0


def operand(x: Tensor) -> tuple[int, ...]:
    """Address and strides of B, NH, S; of B any multiple of 8 where there is one row of it."""
    return x.data_ptr(), 8 if x.shape[0] == 1 else x.stride(0), *x.stride()[1:3]
