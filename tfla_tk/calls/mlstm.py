"""Calls of mLSTM: their description, and the checks of their arguments, on metadata alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tfla_tk.core import transforms
from tfla_tk.core.checks import (
    CHUNK_MULTIPLE,
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    ExpectedTensor,
    autocast_dtype,
    check_bool,
    check_chunk_size,
    check_constant,
    check_cu_seqlens,
    check_device,
    check_dtype_of_q,
    check_eps,
    check_head_dim,
    check_optional_dtype,
    check_shape,
    check_tensor,
    fail,
)
from tfla_tk.core.invariance import is_batch_invariant
from tfla_tk.core.layout import MaybeTensor, state_dtype

# of q, k, v, i, f, c_initial and n_initial
Grads: TypeAlias = tuple[Tensor, ...]
MaybeGrads: TypeAlias = tuple[MaybeTensor, ...]


@dataclass(frozen=True)
class MLSTMCall:
    """What a backend needs to know about one mLSTM call to accept or refuse it.

    heads counts the heads of one batch entry, seq the time steps, dim_qk and dim_v the head dims of q/k and
    of v; sequences is the leading dimension of the states: batch, or with varlen (cu_seqlens is given) the
    number of packed sequences; requires_grad says that a gradient will be recorded; recompute_states is for
    the Triton kernels' backward; batch_invariant is the option of that name. A step and a few tokens alone
    have dtype_state, of the state that is returned, and inplace, which says that each part of the given state
    is overwritten in the dtype it has.
    """

    device: torch.device
    dtype: torch.dtype
    batch: int
    sequences: int
    heads: int
    seq: int
    dim_qk: int
    dim_v: int
    sigmoid_gate: bool
    normalize: bool
    return_last_states: bool
    varlen: bool
    requires_grad: bool
    chunk_size: int
    eps: float
    forward_mode: bool = False
    transformed: bool = False
    recompute_states: bool = True
    batch_invariant: bool = False
    dtype_state: torch.dtype = torch.float32
    inplace: bool = False

    @property
    def is_empty(self) -> bool:
        """True when there is no token to compute."""
        return self.batch * self.heads * self.seq == 0


def check_mlstm_chunkwise(
    *, autocast_kernel_dtype: Any, recompute_states_in_bw: Any, **arguments: Any
) -> MLSTMCall:
    """Check all arguments of `mlstm_chunkwise` or `mlstm_siging_chunkwise` but `backend`; describe the call.

    Raises:
        TypeError, ValueError: as in `check_mlstm`.
    """
    check_optional_dtype("autocast_kernel_dtype", autocast_kernel_dtype, KERNEL_DTYPES)
    recompute = check_bool("recompute_states_in_bw", recompute_states_in_bw)
    dtype = autocast_dtype(arguments["q"], autocast_kernel_dtype)
    return check_mlstm(**arguments, autocast_dtype=dtype, recompute_states=recompute)


def check_mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None,
    n_initial: Tensor | None,
    m_initial: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    sigmoid_gate: bool,
    normalize: bool,
    return_last_states: bool,
    eps: float,
    chunk_size: int,
    autocast_dtype: torch.dtype | None = None,
    recompute_states: bool = True,
) -> MLSTMCall:
    """Check one mLSTM call and describe it.

    Args:
        q, k: queries and keys [B, NH, S, DHQK]. v: values [B, NH, S, DHHV].
        i, f: gate pre-activations [B, NH, S].
        c_initial, n_initial, m_initial: initial state [B, NH, DHQK, DHHV], [B, NH, DHQK], [B, NH, 1], with N
            in place of B where cu_seqlens is given.
        cu_seqlens: offsets [N + 1] of N sequences packed in a batch of one, int32 or int64; not read.
        autocast_dtype: the dtype that q, k and v will be cast to, where autocast is on; they may differ then.
        recompute_states: of the Triton kernels' backward, instead of storing them.

    Raises:
        TypeError: not a tensor, a wrong dtype, mixed dtypes, wrong Python type.
        ValueError: wrong rank, shape, device or value, an incomplete initial state.
    """
    check_tensor("q", q, 4, "[B, NH, S, DHQK]")
    batch, heads, seq, dim_qk = q.shape
    check_tensor("k", k, 4, "[B, NH, S, DHQK]")
    check_shape("k", k, (batch, heads, seq, dim_qk), "[B, NH, S, DHQK] of q")
    check_tensor("v", v, 4, "[B, NH, S, DHHV]")
    dim_v = v.shape[3]
    check_shape("v", v, (batch, heads, seq, dim_v), "[B, NH, S] of q and [DHHV]")
    check_head_dim("q", q)
    check_head_dim("v", v)
    for name, gate in (("i", i), ("f", f)):
        check_tensor(name, gate, 3, "[B, NH, S]")
        check_shape(name, gate, (batch, heads, seq), "[B, NH, S] of q")
    for name, value in (("k", k), ("v", v), ("i", i), ("f", f)):
        check_device(name, value, q.device)
    if autocast_dtype is None:
        for name, value in (("k", k), ("v", v)):
            check_dtype_of_q(name, value, q.dtype)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q)
    normalize = check_bool("normalize", normalize)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows, label = (sequences, heads, dim_qk, dim_v), "B" if cu_seqlens is None else "N"
    _check_initial_state(
        q, rows, label, c_initial, n_initial, m_initial, needs_n=normalize, needs_m=not sigmoid_gate
    )
    return_last_states = check_bool("return_last_states", return_last_states)
    eps = check_eps(eps)
    chunk_size = check_chunk_size(chunk_size)
    inputs = (q, k, v, i, f, c_initial, n_initial)
    return MLSTMCall(
        device=q.device,
        dtype=q.dtype if autocast_dtype is None else autocast_dtype,
        batch=batch,
        sequences=sequences,
        heads=heads,
        seq=seq,
        dim_qk=dim_qk,
        dim_v=dim_v,
        sigmoid_gate=sigmoid_gate,
        normalize=normalize,
        return_last_states=return_last_states,
        varlen=cu_seqlens is not None,
        requires_grad=torch.is_grad_enabled()
        and any(t is not None and transforms.requires_grad(t) for t in inputs),
        chunk_size=chunk_size,
        eps=eps,
        forward_mode=transforms.has_tangent((*inputs, m_initial)),
        transformed=any(t is not None and transforms.is_transformed(t) for t in (*inputs, m_initial)),
        recompute_states=recompute_states,
        batch_invariant=is_batch_invariant(),
    )


def check_mlstm_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor | None,
    **options: Any,
) -> MLSTMCall:
    """Check one mLSTM step and describe it as a call of one time step.

    Args:
        q, k: query and key [B, NH, DHQK]. v: value [B, NH, DHHV].
        i, f: gate pre-activations [B, NH, 1].
        c, n, m, options: as in `check_mlstm_sequence`.

    Raises:
        TypeError, ValueError: as in `check_mlstm_sequence`.
    """
    check_tensor("q", q, 3, "[B, NH, DHQK]")
    batch, heads, dim_qk = q.shape
    check_tensor("v", v, 3, "[B, NH, DHHV]")
    dim_v = v.shape[2]
    tokens: list[ExpectedTensor] = [
        ("k", k, (batch, heads, dim_qk), "[B, NH, DHQK] of q"),
        ("v", v, (batch, heads, dim_v), "[B, NH] of q and [DHHV]"),
        ("i", i, (batch, heads, 1), "[B, NH, 1]"),
        ("f", f, (batch, heads, 1), "[B, NH, 1]"),
    ]
    return _check_decoding(tokens, (q, k, v, i, f, c, n, m), seq=1, **options)


def check_mlstm_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor | None,
    **options: Any,
) -> MLSTMCall:
    """Check a few tokens of mLSTM that go on from a state, and describe them.

    Args:
        q, k: queries and keys [B, NH, S, DHQK]. v: values [B, NH, S, DHHV].
        i, f: gate pre-activations [B, NH, S].
        c, n, m: state [B, NH, DHQK, DHHV], [B, NH, DHQK], [B, NH, 1]; m is None with the sigmoid gate.
        options: sigmoid_gate, normalize, eps, dtype_state and inplace: whether the state will be overwritten.

    Raises:
        TypeError: not a tensor, a wrong dtype, mixed dtypes, wrong Python type.
        ValueError: wrong rank, shape, device or value.
    """
    check_tensor("q", q, 4, "[B, NH, S, DHQK]")
    batch, heads, seq, dim_qk = q.shape
    check_tensor("v", v, 4, "[B, NH, S, DHHV]")
    dim_v = v.shape[3]
    tokens: list[ExpectedTensor] = [
        ("k", k, (batch, heads, seq, dim_qk), "[B, NH, S, DHQK] of q"),
        ("v", v, (batch, heads, seq, dim_v), "[B, NH, S] of q and [DHHV]"),
        ("i", i, (batch, heads, seq), "[B, NH, S] of q"),
        ("f", f, (batch, heads, seq), "[B, NH, S] of q"),
    ]
    return _check_decoding(tokens, (q, k, v, i, f, c, n, m), seq=seq, **options)


def _check_decoding(
    tokens: list[ExpectedTensor],
    tensors: tuple[Any, ...],
    *,
    seq: int,
    sigmoid_gate: bool,
    normalize: bool,
    eps: float,
    dtype_state: torch.dtype | None,
    inplace: bool = False,
) -> MLSTMCall:
    """What a step and a few tokens have in common.

    Args:
        tokens: what is expected of k, v, i and f, in this order. tensors: q, k, v, i, f, c, n, m.
    """
    q, k, v, i, f, c, n, m = tensors
    batch, heads, *_, dim_qk = q.shape
    dim_v = v.shape[-1]
    checks = [
        *tokens,
        ("c", c, (batch, heads, dim_qk, dim_v), "[B, NH, DHQK, DHHV]"),
        ("n", n, (batch, heads, dim_qk), "[B, NH, DHQK]"),
    ]
    if not sigmoid_gate:
        checks.append(("m", m, (batch, heads, 1), "[B, NH, 1]"))
    for name, t, shape, layout in checks:
        check_tensor(name, t, len(shape), layout)
        check_shape(name, t, shape, layout)
        check_device(name, t, q.device)
    for name, t in (("k", k), ("v", v)):
        check_dtype_of_q(name, t, q.dtype)
    for name, size in (("q", dim_qk), ("v", dim_v)):
        if size == 0:
            fail(name, "a head dimension of at least 1", size)
    normalize = check_bool("normalize", normalize)
    eps = check_eps(eps)
    check_optional_dtype("dtype_state", dtype_state, FLOAT_DTYPES)
    requires_grad = torch.is_grad_enabled() and any(map(transforms.requires_grad, (q, k, v, i, f, c, n)))
    inplace = check_bool("inplace", inplace)
    if inplace and requires_grad:
        fail("inplace", "False where a gradient is recorded (torch.no_grad() records none)", inplace)
    check_constant("m", m)
    for name, t in (("c", c), ("n", n), ("m", m)):
        if not inplace or t is None:
            continue
        if any(step == 0 and size > 1 for step, size in zip(t.stride(), t.shape, strict=True)):
            fail(name, "a place for every element, in place", f"strides {tuple(t.stride())}")
        if dtype_state not in (None, t.dtype):
            fail("dtype_state", f"None or {t.dtype}, the dtype of {name}, in place", dtype_state)
    return MLSTMCall(
        device=q.device,
        dtype=q.dtype,
        batch=batch,
        sequences=batch,
        heads=heads,
        seq=seq,
        dim_qk=dim_qk,
        dim_v=dim_v,
        sigmoid_gate=sigmoid_gate,
        normalize=normalize,
        return_last_states=True,
        varlen=False,
        requires_grad=requires_grad,
        chunk_size=CHUNK_MULTIPLE,
        eps=eps,
        forward_mode=transforms.has_tangent(tensors),
        transformed=any(t is not None and transforms.is_transformed(t) for t in tensors),
        batch_invariant=is_batch_invariant(),
        dtype_state=dtype_state or state_dtype(q),
        inplace=inplace,
    )


def _check_initial_state(
    q: Tensor,
    shape: tuple[int, int, int, int],
    rows: str,
    c: Tensor | None,
    n: Tensor | None,
    m: Tensor | None,
    *,
    needs_n: bool,
    needs_m: bool,
) -> None:
    """All of the state or none of it, c of the given shape."""
    given = [name for name, t in (("c_initial", c), ("n_initial", n), ("m_initial", m)) if t is not None]
    needed = ["c_initial"] + ["n_initial"] * needs_n + ["m_initial"] * needs_m
    if given and not set(needed) <= set(given):
        wanted = f"all of {', '.join(needed)} or none" if len(needed) > 1 else f"{needed[0]} or none"
        if m is not None and not needs_m:
            wanted += " (the sigmoid gate has no m_initial)"
        fail("initial state", wanted, f"only {', '.join(given)}")
    for name, t, expected, layout in (
        ("c_initial", c, shape, f"[{rows}, NH, DHQK, DHHV]"),
        ("n_initial", n, shape[:3], f"[{rows}, NH, DHQK]"),
        ("m_initial", m, (*shape[:2], 1), f"[{rows}, NH, 1]"),
    ):
        if t is not None:
            check_tensor(name, t, len(expected), layout)
            check_shape(name, t, expected, layout)
            check_device(name, t, q.device)
    check_constant("m_initial", m)
