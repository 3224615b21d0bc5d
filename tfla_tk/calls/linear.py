"""Calls of the operators in [B, T, H, D]: their description, and the checks of their arguments."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla_tk.core import checks, transforms
from tfla_tk.core.eager import is_eager
from tfla_tk.core.invariance import is_batch_invariant
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.support import Call

DEFAULT_CHUNK = 64
MOST_STEPS = 64  # tokens that fla's layers compute by a recurrence


@dataclass(frozen=True, kw_only=True)
class LinearCall(Call):
    """What a backend needs to know about one call to accept or refuse it."""

    chunk_size: int = DEFAULT_CHUNK
    value_heads: int  # those of v, gates and states, of one batch entry; as many as heads, or a multiple
    # "none", "token" (a decay per token and head), "head" (a decay per head, without gradient) or "channel"
    # (one per token, head and key channel)
    gate: str
    scale: float
    output_final_state: bool
    has_initial: bool
    state_v_first: bool
    recurrent: bool = False  # it is of a function that goes token by token
    state_in_place: torch.dtype | None = None  # dtype of a state that is overwritten; None where none is

    @property
    def by_channel(self) -> bool:
        """The decay is per key channel."""
        return self.gate == "channel"

    def goes_by_token(self, most: int = MOST_STEPS) -> bool:
        """Whether a recurrence serves the call best: up to `most` tokens per sequence, without gradients.
        Of packed sequences, whose lengths are on the device, the mean counts."""
        sequences = self.sequences if self.varlen else 1
        return self.recurrent and not self.requires_grad and self.seq <= most * sequences


class SimpleGLACore(NamedTuple):
    """A call of the kernels of a scalar decay."""

    q: Tensor  # [B, T, H, K], any strides, as of k and v
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V], q's dtype
    # log decay in fp32 or 16 bits (fp64 for fp64 q), [B, T, HV] of any strides, or [HV] of every token, which
    # has no gradient; None: nothing decays
    g: MaybeTensor
    initial_state: MaybeTensor  # [N, HV, K, V] in fp32 (fp64 for fp64 q), any strides; None: zeros
    # [N + 1] offsets of sequences packed in a batch of one, int32 or int64; not read on the host
    cu_seqlens: MaybeTensor
    scale: float  # of q k^T, positive
    batch_invariant: bool = False  # the option of that name


class GLACore(NamedTuple):
    """A call of the kernels; the arguments of the registered op tfla_tk::gla_fwd in their order. g: [B, T,
    H, K] log decay, fp32 or of 16 bits (fp64 for fp64 q), any strides. others: as of `SimpleGLACore`, HV =
    H."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    initial_state: MaybeTensor
    cu_seqlens: MaybeTensor
    scale: float
    batch_invariant: bool


def check_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    initial_state: Tensor | None,
    *,
    chunk_size: int | None,
    **options: Any,
) -> LinearCall:
    """Check one call with a scalar decay, g [B, T, HV] or g_gamma [HV] or none, and describe it. options:
    as of `check_frame`."""
    operands = check_operands(q, k, v)
    gate = _check_gates(g, g_gamma, q, operands.gate_shape)
    frame = check_frame(q, operands, initial_state, v_first_in="chunk_simple_gla", **options)
    size = (
        DEFAULT_CHUNK if chunk_size is None else checks.check_int("chunk_size", chunk_size, "an int or None")
    )
    if size < 1 or size & (size - 1):
        checks.fail("chunk_size", "a power of two", chunk_size)
    return LinearCall(
        **frame,
        **transforms.of_call((q, k, v, g, initial_state), (g_gamma,)),
        gate=gate,
        chunk_size=size,
    )


def check_gla(
    q: Any, k: Any, v: Any, g: Any, initial_state: Any, *, gate: str = "g", **options: Any
) -> LinearCall:
    """Check one call of gated linear attention and describe it; its gate is "channel". g: [B, T, H, K],
    and its name in messages. v has the heads of q. options: as of `check_frame`."""
    operands = check_operands(q, k, v, grouped=False)
    checks.check_tensor(gate, g, 4, "[B, T, H, K]")
    checks.check_shape(gate, g, tuple(q.shape), "[B, T, H, K] of q")
    checks.check_device(gate, g, q.device)
    frame = check_frame(q, operands, initial_state, v_first_in="chunk_gla", heads="H", **options)
    return LinearCall(**frame, **transforms.of_call((q, k, v, g, initial_state), ()), gate="channel")


class Operands(NamedTuple):
    """The sizes of q, k and v, and the dtype that they are computed in."""

    batch: int
    seq: int
    heads: int
    value_heads: int
    dim_qk: int
    dim_v: int
    dtype: torch.dtype

    @property
    def gate_shape(self) -> tuple[int, int, int]:
        """[B, T, HV]."""
        return self.batch, self.seq, self.value_heads


def check_operands(q: Any, k: Any, v: Any, *, grouped: bool = True) -> Operands:
    """Check q, k [B, T, H, K] and v [B, T, HV, V], HV a multiple of H; grouped=False: HV is H."""
    checks.check_tensor("q", q, 4, "[B, T, H, K]")
    batch, seq, heads, dim_qk = q.shape
    checks.check_tensor("k", k, 4, "[B, T, H, K]")
    checks.check_shape("k", k, (batch, seq, heads, dim_qk), "[B, T, H, K] of q")
    checks.check_tensor("v", v, 4, "[B, T, HV, V]")
    value_heads, dim_v = v.shape[2:]
    checks.check_shape("v", v, (batch, seq, value_heads, dim_v), "[B, T] of q and [HV, V]")
    found = f"{value_heads} with shape {tuple(v.shape)}"
    if value_heads != heads and not grouped:
        checks.fail(
            "v", f"the {checks.counted(heads, 'head')} of q (repeat q, k and their gates for more)", found
        )
    if value_heads != heads and (heads == 0 or value_heads == 0 or value_heads % heads != 0):
        checks.fail("v", f"a multiple of q's {checks.counted(heads, 'head')}", found)
    checks.check_head_dim("q", q)
    checks.check_head_dim("v", v)
    for name, value in (("k", k), ("v", v)):
        checks.check_device(name, value, q.device)
    dtype = checks.autocast_dtype(q, None)
    if dtype is None:
        dtype = q.dtype
        for name, value in (("k", k), ("v", v)):
            checks.check_dtype_of_q(name, value, dtype)
    return Operands(batch, seq, heads, value_heads, dim_qk, dim_v, dtype)


def check_gate(name: str, value: Any, q: Tensor, shape: tuple[int, int, int]) -> None:
    """A number per token and head of v."""
    checks.check_tensor(name, value, 3, "[B, T, HV]")
    checks.check_shape(name, value, shape, "[B, T, HV] of v")
    checks.check_device(name, value, q.device)


def check_frame(
    q: Tensor,
    operands: Operands,
    initial_state: Any,
    *,
    cu_seqlens: Any,
    cu_seqlens_cpu: Any,
    scale: Any,
    output_final_state: Any,
    state_v_first: Any,
    v_first_in: str,
    heads: str = "HV",
) -> dict[str, Any]:
    """Check what every operator has beside its operands and gates, as the public functions have it; the
    fields of its `LinearCall`. cu_seqlens_cpu: see `check_same_offsets`. v_first_in: the family's function
    that has state_v_first; others pass False. heads: the name of the heads of a state in messages."""
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, q)
    _check_cpu_offsets(cu_seqlens_cpu, cu_seqlens)
    state_v_first = checks.check_bool("state_v_first", state_v_first)
    sequences = operands.batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None:
        rows = "B" if cu_seqlens is None else "N"
        layout, swapped = f"[{rows}, {heads}, K, V]", f"[{rows}, {heads}, V, K]"
        dims = operands.dim_qk, operands.dim_v
        if state_v_first:
            layout, swapped, dims = swapped, layout, dims[::-1]
        checks.check_tensor("initial_state", initial_state, 4, layout)
        hint, last = "", initial_state.shape[2:]
        if last != dims and last == dims[::-1]:
            hint = f" (state_v_first={not state_v_first} of {v_first_in} takes {swapped})"
        expected = (sequences, operands.value_heads, *dims)
        checks.check_shape("initial_state", initial_state, expected, layout, hint)
        checks.check_device("initial_state", initial_state, q.device)
    if scale is not None:
        number = checks.check_number("scale", scale, "a number or None")
        if not abs(number) < math.inf:  # math.isfinite takes no symbol of torch.compile
            checks.fail("scale", "a finite number", scale)
        scale = number
    return {
        **operands._asdict(),
        "device": q.device,
        "sequences": sequences,
        "scale": operands.dim_qk**-0.5 if scale is None else scale,
        "output_final_state": checks.check_bool("output_final_state", output_final_state),
        "has_initial": initial_state is not None,
        "state_v_first": state_v_first,
        "varlen": cu_seqlens is not None,
        "batch_invariant": is_batch_invariant(),
    }


def check_layer(layer_idx: Any, num_layers: Any) -> tuple[int, int]:
    """The place of a layer among all of them, from 0 to one less than their number; as Python's integers."""
    expected = "an int, or g_gamma in its place"
    layer = checks.check_int("layer_idx", layer_idx, expected)
    count = checks.check_int("num_layers", num_layers, expected)
    if count < 1:
        checks.fail("num_layers", "at least 1", num_layers)
    if not 0 <= layer < count:
        checks.fail("layer_idx", f"0 to num_layers - 1 = {count - 1}", layer_idx)
    return layer, count


def _check_gates(g: Any, g_gamma: Any, q: Tensor, shape: tuple[int, int, int]) -> str:
    if g is not None and g_gamma is not None:
        checks.fail(
            "g_gamma", "None where g is given (g + g_gamma is a decay per token)", "both g and g_gamma"
        )
    if g is not None:
        check_gate("g", g, q, shape)
        return "token"
    if g_gamma is None:
        return "none"
    checks.check_tensor("g_gamma", g_gamma, 1, "[HV]")
    checks.check_shape("g_gamma", g_gamma, shape[2:], "[HV] of v")
    checks.check_device("g_gamma", g_gamma, q.device)
    if torch.is_grad_enabled() and transforms.requires_grad(g_gamma):
        expected = (
            "no requires_grad (a decay per head is a constant; g = g_gamma.expand(B, T, HV) has a gradient)"
        )
        checks.fail("g_gamma", expected, "a tensor that has it")
    return "head"


def _check_cpu_offsets(value: Any, cu_seqlens: Tensor | None) -> None:
    name = "cu_seqlens_cpu"
    if value is None:
        return
    if not isinstance(value, Tensor):
        checks.fail(name, "a tensor [N + 1] or None", type(value).__name__, TypeError)
    if cu_seqlens is None:
        checks.fail(name, "None without cu_seqlens", "a tensor")
    if value.device.type not in ("cpu", "meta"):
        checks.fail(name, "a tensor on the CPU", f"one on {value.device}")
    if value.dtype not in checks.OFFSET_DTYPES:
        checks.fail(name, "dtype int32 or int64", value.dtype, TypeError)
    checks.check_shape(name, value, tuple(cu_seqlens.shape), "[N + 1] of cu_seqlens")


def check_same_offsets(cu_seqlens: Any, cu_seqlens_cpu: Any) -> None:
    """cu_seqlens_cpu has the entries of cu_seqlens, where these lie on the CPU and nothing traces the
    call. Other arguments pass, also of wrong types. This reads values, on which plans do not depend, so a
    public function asks it in every call, before it looks for a plan."""
    if not isinstance(cu_seqlens, Tensor) or not isinstance(cu_seqlens_cpu, Tensor):
        return
    tensors = cu_seqlens, cu_seqlens_cpu
    if any(x.device.type != "cpu" for x in tensors) or not is_eager(tensors):
        return
    if any(x.is_nested or x.layout is not torch.strided or x.dim() != 1 for x in tensors):
        return
    if cu_seqlens.shape != cu_seqlens_cpu.shape:
        return
    for index, (expected, got) in enumerate(zip(*(x.tolist() for x in tensors), strict=True)):
        if expected != got:
            where = f"{got} at index {index}, where cu_seqlens has {expected}"
            checks.fail("cu_seqlens_cpu", "the offsets of cu_seqlens", where)
