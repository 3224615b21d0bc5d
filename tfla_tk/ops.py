"""The registered mLSTM ops: one forward and one backward, with CPU, CUDA, fake and autograd implementations.

They are the path of the tk backend. On a CPU they compute the reference, so that torch.compile, fake tensors
and opcheck can be tested on any machine. Arguments are not validated here: the public functions do that.

tfla_tk::mlstm_fwd returns (h, c, n, m):
    h [B, NH, S, V] in q's dtype and, where v is a dense permutation, v's memory order;
    c [B, NH, K, V], n [B, NH, K], m [B, NH, 1]: last state, fp32 (fp64 for fp64 inputs); empty tensors [0]
    without return_last_states, and m is always empty with the sigmoid gate.
tfla_tk::mlstm_bwd returns (dq, dk, dv, di, df, dc_initial, dn_initial), each like its input; the last two are
    empty tensors [0] where no initial state was given.
schedule: how the CUDA kernel overlaps its steps, one of SCHEDULES; the result does not depend on it beyond
    rounding.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from tfla_tk.build import instances
from tfla_tk.validation import MLSTMCall

SCHEDULES = ("auto", *instances.SCHEDULES)

Output: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
Grads: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
MaybeTensor: TypeAlias = Tensor | None

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, "
    "Tensor? c_initial, Tensor? n_initial, Tensor? m_initial, "
)
_library = torch.library.Library("tfla_tk", "DEF")
_library.define(
    f"mlstm_fwd({_INPUTS}bool sigmoid_gate, bool normalize, float eps, bool return_last_states, str schedule)"
    " -> (Tensor h, Tensor c, Tensor n, Tensor m)"
)
_library.define(
    f"mlstm_bwd({_INPUTS}Tensor dh, Tensor? dc_last, Tensor? dn_last, "
    "bool sigmoid_gate, bool normalize, float eps, str schedule)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor di, Tensor df, Tensor dc_initial, Tensor dn_initial)"
)
_fwd = torch.ops.tfla_tk.mlstm_fwd.default
_bwd = torch.ops.tfla_tk.mlstm_bwd.default


def mlstm(
    call: MLSTMCall,
    schedule: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: MaybeTensor,
    n_initial: MaybeTensor,
    m_initial: MaybeTensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The tk backend: tfla_tk::mlstm_fwd with gates and initial state cast to what the kernels read.

    Returns:
        h and the last state, (c, n, m) or with the sigmoid gate (c, n); empty tensors unless asked for.
    """
    dtype = state_dtype(q)
    c = None if c_initial is None else c_initial.to(dtype)
    n = None if n_initial is None or not call.normalize else n_initial.to(dtype)
    m = None if m_initial is None or call.sigmoid_gate else m_initial.to(dtype)
    h, c_last, n_last, m_last = _fwd(
        q,
        k,
        v,
        i.to(dtype),
        f.to(dtype),
        c,
        n,
        m,
        call.sigmoid_gate,
        call.normalize,
        call.eps,
        call.return_last_states,
        schedule,
    )
    return h, (c_last, n_last) if call.sigmoid_gate else (c_last, n_last, m_last)


def state_dtype(q: Tensor) -> torch.dtype:
    """dtype of gates and states inside the ops: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(q.dtype, torch.float32)


# CPU: the reference


def _fwd_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: MaybeTensor,
    n_initial: MaybeTensor,
    m_initial: MaybeTensor,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    return_last_states: bool,
    schedule: str,
) -> Output:
    import tfla_tk.reference as forms

    tensors = (q, k, v, i, f, c_initial, n_initial)
    if sigmoid_gate:
        h, last = forms.mlstm_siging_chunkwise(
            *tensors, return_last_states=True, eps=eps, normalize=normalize
        )
    else:
        h, last = forms.mlstm_chunkwise(*tensors, m_initial, return_last_states=True, eps=eps)
    result = torch.empty_like(v)
    result.copy_(h)
    if not return_last_states:
        last = ()
    # own memory: an op may not return a view of its input
    states = [t.clone() for t in last]
    states += [q.new_empty(0, dtype=state_dtype(q)) for _ in range(3 - len(states))]
    return result, states[0], states[1], states[2]


def _bwd_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: MaybeTensor,
    n_initial: MaybeTensor,
    m_initial: MaybeTensor,
    dh: Tensor,
    dc_last: MaybeTensor,
    dn_last: MaybeTensor,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    schedule: str,
) -> Grads:
    import tfla_tk.reference as forms

    tensors = (q, k, v, i, f, c_initial, n_initial)
    if sigmoid_gate:
        grads = forms.mlstm_siging_backward(
            *tensors, dh=dh, dc_last=dc_last, dn_last=dn_last, eps=eps, normalize=normalize
        )
    else:
        grads = forms.mlstm_backward(*tensors, m_initial, dh=dh, dc_last=dc_last, dn_last=dn_last, eps=eps)
    values = (grads.q, grads.k, grads.v, grads.i, grads.f, grads.c_initial, grads.n_initial)
    out = _grads_like(q, tensors)
    for buffer, value in zip(out, values, strict=True):
        if buffer.numel() > 0:
            buffer.copy_(value)
    return out


# CUDA: the ThunderKittens kernels, imported on the first call


def _fwd_cuda(*args: Any) -> Output:
    from tfla_tk.backends import tk

    out: Output = tk.mlstm_fwd(*args)
    return out


# Fake: shapes, dtypes and strides alone


def _fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: MaybeTensor,
    n_initial: MaybeTensor,
    m_initial: MaybeTensor,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    return_last_states: bool,
    schedule: str,
) -> Output:
    batch, heads, _, dim_qk = q.shape
    shapes: list[tuple[int, ...]] = [(0,), (0,), (0,)]
    if return_last_states:
        shapes[:2] = (batch, heads, dim_qk, v.shape[-1]), (batch, heads, dim_qk)
        if not sigmoid_gate:
            shapes[2] = (batch, heads, 1)
    c, n, m = (q.new_empty(shape, dtype=state_dtype(q)) for shape in shapes)
    return torch.empty_like(v), c, n, m


def _bwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: MaybeTensor,
    n_initial: MaybeTensor,
    *rest: Any,
) -> Grads:
    return _grads_like(q, (q, k, v, i, f, c_initial, n_initial))


def _grads_like(q: Tensor, tensors: tuple[MaybeTensor, ...]) -> Grads:
    """Uninitialised gradients, each like its input; [0] where there is none."""
    empty = [q.new_empty(0, dtype=state_dtype(q)) if t is None else torch.empty_like(t) for t in tensors]
    return empty[0], empty[1], empty[2], empty[3], empty[4], empty[5], empty[6]


# Autograd


class _MLSTM(torch.autograd.Function):
    """Records the backward op; inputs are saved, nothing else."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Output:
        *tensors, sigmoid_gate, normalize, eps, return_last_states, schedule = args
        with torch._C._AutoDispatchBelowAutograd():
            h, c, n, m = _fwd(*args)
        ctx.save_for_backward(*tensors)
        ctx.options = sigmoid_gate, normalize, eps, schedule
        ctx.set_materialize_grads(False)
        # the stabiliser is a constant of the differentiation
        ctx.mark_non_differentiable(*((m,) if return_last_states else (c, n, m)))
        return h, c, n, m

    @staticmethod
    def backward(ctx: Any, *grads: MaybeTensor) -> tuple[MaybeTensor, ...]:
        dh, dc_last, dn_last, _ = grads
        tensors = ctx.saved_tensors
        if dh is None:
            dh = torch.zeros_like(tensors[2])
        result = _bwd(*tensors, dh, dc_last, dn_last, *ctx.options)
        found = [g if needed else None for g, needed in zip(result, ctx.needs_input_grad, strict=False)]
        return (*found, *(None,) * (len(ctx.needs_input_grad) - len(found)))


class _MLSTMBackward(torch.autograd.Function):
    """Stands where a second derivative would be."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Grads:
        with torch._C._AutoDispatchBelowAutograd():
            out: Grads = _bwd(*args)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: MaybeTensor) -> tuple[MaybeTensor, ...]:
        raise RuntimeError(
            "double backward of mLSTM is not implemented; backend='reference' is plain autograd and has it"
        )


def _records(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


def _fwd_autograd(*args: Any) -> Output:
    if _records(args):
        out: Output = _MLSTM.apply(*args)
        return out
    with torch._C._AutoDispatchBelowAutograd():
        out = _fwd(*args)
    return out


def _bwd_autograd(*args: Any) -> Grads:
    if _records(args):
        out: Grads = _MLSTMBackward.apply(*args)
        return out
    with torch._C._AutoDispatchBelowAutograd():
        out = _bwd(*args)
    return out


_library.impl("mlstm_fwd", _fwd_cpu, "CPU")
_library.impl("mlstm_bwd", _bwd_cpu, "CPU")
_library.impl("mlstm_fwd", _fwd_cuda, "CUDA")
_library.impl("mlstm_fwd", _fwd_autograd, "Autograd")
_library.impl("mlstm_bwd", _bwd_autograd, "Autograd")
torch.library.register_fake("tfla_tk::mlstm_fwd", _fwd_fake, lib=_library)
torch.library.register_fake("tfla_tk::mlstm_bwd", _bwd_fake, lib=_library)
