"""The registered ops of one token of mLSTM and of a few, for CPU, CUDA and fake tensors; no gradients.

Like those of whole sequences (mlstm.py) they are the path of the tk backend and the reference on a CPU, and
their arguments are not validated here.

tfla_tk::mlstm_step is one token: q, k [B, NH, K], v [B, NH, V], i, f [B, NH, 1], and the state c, n, m in any
    dtypes, m null with the sigmoid gate. It returns (h, c, n, m): h [B, NH, V] in q's dtype and the state in
    dtype_state; in 16 bits m is rounded, and c and n are relative to the rounded m. m is an empty tensor [0]
    with the sigmoid gate; without normaliser n is copied.
tfla_tk::mlstm_step_ writes the state over the one it read, each part in its own dtype, and returns h.
tfla_tk::mlstm_sequence and tfla_tk::mlstm_sequence_ take q, k [B, NH, S, K], v [B, NH, S, V], i, f [B, NH, S]
    and are otherwise alike: h is [B, NH, S, V], and the state is the one after the last token, rounded once.
batch_invariant is the option of that name; implementations may get one argument less, as of mlstm.py.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core import flops, library, transforms
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.ops import autograd

StepOutput: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]

_library = library.get()
_TOKENS = "Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, "


def _define(name: str) -> None:
    """Define the ops `name`, which returns a new state, and `name_`, which overwrites the one it is given."""
    _library.define(
        f"{name}({_TOKENS}Tensor c, Tensor n, Tensor? m, "
        "bool sigmoid_gate, bool normalize, float eps, ScalarType dtype_state, bool batch_invariant=False)"
        " -> (Tensor h, Tensor c_next, Tensor n_next, Tensor m_next)"
    )
    _library.define(
        f"{name}_({_TOKENS}Tensor(a!) c, Tensor(b!) n, Tensor(c!)? m, "
        "bool sigmoid_gate, bool normalize, float eps, bool batch_invariant=False) -> Tensor h"
    )


_define("mlstm_step")
_define("mlstm_sequence")
_step = torch.ops.tfla_tk.mlstm_step.default
_step_in_place = torch.ops.tfla_tk.mlstm_step_.default
_sequence = torch.ops.tfla_tk.mlstm_sequence.default
_sequence_in_place = torch.ops.tfla_tk.mlstm_sequence_.default


def mlstm_step(call: MLSTMCall, *tensors: Any, direct: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The tk backend's step: tfla_tk::mlstm_step, or mlstm_step_ in place.

    Args:
        tensors: q, k, v, i, f, c, n, m.
        direct: call the kernel, not the op: for plain eager calls.

    Returns:
        h and the next state, (c, n, m) or with the sigmoid gate (c, n), as the call wants it stored.
    """
    if direct:
        return _apply(call, tensors, _kernel_step, _direct_step_in_place)
    return _apply(call, tensors, _step, _step_in_place)


def mlstm_sequence(call: MLSTMCall, *tensors: Any, direct: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The tk backend's few tokens; arguments and results as of `mlstm_step`."""
    if direct:
        return _apply(call, tensors, _kernel_sequence, _direct_sequence_in_place)
    return _apply(call, tensors, _sequence, _sequence_in_place)


def _apply(
    call: MLSTMCall, tensors: tuple[Any, ...], new_state: Any, in_place: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Call one of a pair of ops, or one of their kernels; results as of `mlstm_step`."""
    *token, c, n, m = tensors
    m = None if call.sigmoid_gate else m
    options = (call.sigmoid_gate, call.normalize, call.eps)
    if call.inplace:
        h = in_place(*token, c, n, m, *options, call.batch_invariant)
        return h, (c, n) if m is None else (c, n, m)
    # no kernel writes fp64
    written = torch.float32 if call.dtype_state == torch.float64 else call.dtype_state
    h, c, n, m_next = new_state(*token, c, n, m, *options, written, call.batch_invariant)
    state = (c, n) if m is None else (c, n, m_next)
    return h, state if written == call.dtype_state else tuple(x.to(call.dtype_state) for x in state)


# The least finite m of a state in 16 bits. e^m is 0 far above it, and numbers below it are so far apart that
# the rounding error of m would take c beyond the range of its dtype.
_LEAST_M = -16384.0


def _written(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What mlstm_step_ writes; without normaliser n stays as it is."""
    c, n, m, sigmoid_gate, normalize = args[5:10]
    if not sigmoid_gate:
        return c, n, m
    return (c, n) if normalize else (c,)


def representable(c: Tensor, n: Tensor, m: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same state with an m that dtype holds exactly; what m loses in rounding goes into c and n.

    Rounding m alone would scale everything remembered by e^(error): 3 % at m = 8 in bfloat16, and a decay of
    less than that would never happen. A finite m below -16384 becomes -16384; m = -inf, of an empty state,
    stays.

    Args:
        c: [B, NH, DHQK, DHHV]. n: [B, NH, DHQK]. m: [B, NH, 1]. dtype: a dtype of 16 bits.

    Returns:
        (c, n, m) in the dtypes they came in.
    """
    kept = m.clamp(min=_LEAST_M).to(dtype).to(m.dtype)
    kept = torch.where(m == -torch.inf, m, kept)
    scale = torch.where(kept == m, 1.0, torch.exp(m - kept)).to(c.dtype)
    return c * scale[..., None], n * scale, kept


def stored(call: MLSTMCall, state: tuple[Tensor, ...], given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """A new state as the call wants it: in its dtype_state, or over the given one.

    Args:
        state: (c, n, m) or with the sigmoid gate (c, n), in any dtypes. given: the state before.
    """
    given = given[: len(state)]
    dtypes = [x.dtype if call.inplace else call.dtype_state for x in given]
    if len(state) == 3 and dtypes[2].itemsize == 2:
        state = representable(*state, dtypes[2])
    if not call.inplace:
        # the sigmoid gate without normaliser hands n through
        return tuple(
            x.clone() if x is old and x.dtype == dtype else x.to(dtype)
            for x, old, dtype in zip(state, given, dtypes, strict=True)
        )
    for old, x in zip(given, state, strict=True):
        if old is not x:
            old.copy_(x)
    return given


# CPU: the reference. These and the fake tensors serve one token and several


def on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: MaybeTensor,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    dtype_state: torch.dtype,
    batch_invariant: bool = False,
) -> StepOutput:
    found = _reference(q, k, v, i, f, c, n, m, sigmoid_gate, normalize, eps, dtype_state)
    out = _outputs_like(q, v, sigmoid_gate, dtype_state)
    # own memory: a result may be one of the inputs
    for buffer, value in zip(out, found, strict=False):
        buffer.copy_(value)
    return out


def in_place_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: MaybeTensor,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    batch_invariant: bool = False,
) -> Tensor:
    dtype = c.dtype if m is None else m.dtype
    h, *state = _reference(q, k, v, i, f, c, n, m, sigmoid_gate, normalize, eps, dtype)
    for target, value in zip((c, n, m), state, strict=False):
        if target is not None and value is not target:
            target.copy_(value)
    return h


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: MaybeTensor,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    dtype_m: torch.dtype,
) -> tuple[Tensor, ...]:
    """h and (c, n) or (c, n, m) of at least fp32, relative to an m that dtype_m holds."""
    from tfla_tk.ops import mlstm_reference as reference

    h, (c, n, *last_m) = reference.decode(q, k, v, i, f, c, n, m, normalize=normalize, eps=eps)
    if last_m and dtype_m.itemsize == 2:
        return h, *representable(c, n, last_m[0], dtype_m)
    return h, c, n, *last_m


# CUDA: the ThunderKittens kernels, imported on the first call


def _kernel_step(*args: Any) -> Any:
    """The op's outputs, m None where it is empty."""
    from tfla_tk.backends.tk.scalar_gate import step as tk_step

    return tk_step.mlstm_step(*args)


def _kernel_step_in_place(*args: Any) -> Tensor:
    from tfla_tk.backends.tk.scalar_gate import step as tk_step

    return tk_step.mlstm_step_(*args)


def _kernel_sequence(*args: Any) -> Any:
    """The op's outputs, m None where it is empty."""
    from tfla_tk.backends.tk.scalar_gate import sequence as tk_sequence

    return tk_sequence.mlstm_sequence(*args)


def _kernel_sequence_in_place(*args: Any) -> Tensor:
    from tfla_tk.backends.tk.scalar_gate import sequence as tk_sequence

    return tk_sequence.mlstm_sequence_(*args)


_direct_step_in_place = autograd.noting_writes(_kernel_step_in_place, _written)
_direct_sequence_in_place = autograd.noting_writes(_kernel_sequence_in_place, _written)


# Fake: shapes, dtypes and strides alone


def as_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: MaybeTensor,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    dtype_state: torch.dtype,
    batch_invariant: bool = False,
) -> StepOutput:
    return _outputs_like(q, v, sigmoid_gate, dtype_state)


def in_place_as_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(v.shape)


def _outputs_like(q: Tensor, v: Tensor, sigmoid_gate: bool, dtype_state: torch.dtype) -> StepOutput:
    """Uninitialised outputs."""
    batch, heads, dim_qk = *q.shape[:2], q.shape[-1]

    def empty(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=dtype_state)

    return (
        q.new_empty(v.shape),
        empty(batch, heads, dim_qk, v.shape[-1]),
        empty(batch, heads, dim_qk),
        empty(0) if sigmoid_gate else empty(batch, heads, 1),
    )


# Autograd: no gradients, and what is written is noted; m is a constant of the differentiation


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise RuntimeError("vmap of a step in place: expected inplace=False, got True")


def _register(name: str, kernel: Any, kernel_in_place: Any) -> None:
    """Give the ops `name` and `name_` their implementations.

    Args:
        kernel: on CUDA; returns the op's outputs, m None where it is empty. kernel_in_place: of `name_`.
    """

    def on_cuda(*args: Any) -> StepOutput:
        h, c, n, m = kernel(*args)
        return h, c, n, c.new_empty(0) if m is None else m

    op, op_in_place = (getattr(torch.ops.tfla_tk, x).default for x in (name, f"{name}_"))
    _library.impl(name, on_cpu, "CPU")
    _library.impl(f"{name}_", in_place_on_cpu, "CPU")
    _library.impl(name, on_cuda, "CUDA")
    _library.impl(f"{name}_", kernel_in_place, "CUDA")
    _library.register_fake(name, as_fake)
    _library.register_fake(f"{name}_", in_place_as_fake)
    _library.impl(name, autograd.without_gradients(name, op, 7), "Autograd")
    _library.impl(f"{name}_", autograd.without_gradients(f"{name}_", op_in_place, 7), "Autograd")
    _library.impl(
        f"{name}_", autograd.noting_writes(autograd.below_versions(op_in_place), _written), "ADInplaceOrView"
    )
    _library.register_vmap(name, transforms.merge_into_batch(op))
    _library.register_vmap(f"{name}_", _refuse_vmap)
    for each in (name, f"{name}_"):
        flops.register(each, flops.step)


_register("mlstm_step", _kernel_step, _kernel_step_in_place)
_register("mlstm_sequence", _kernel_sequence, _kernel_sequence_in_place)
