"""The calls by which engines generate with the gated delta rule, with the names and arguments of vLLM.

    fused_recurrent_gated_delta_rule_packed_decode   a token of every sequence, from the parts of a projection
    fused_sigmoid_gating_delta_rule_update           a few tokens of packed sequences, also drafts of them

SGLang calls the first one alike. Both overwrite states of a pool, and differ from the engines' own in one
argument more: `first_index`, below which an index names no state (vLLM: 1, SGLang: 0). On a GPU the decoding
kernels serve them: nothing is copied, nothing waits for the GPU, and a CUDA graph may hold them. On a CPU the
reference serves them. How to put them into an engine: docs/engines.md.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tfla_tk.backends.tk import recurrent as kernels
from tfla_tk.calls.delta_rule import check_delta_rule
from tfla_tk.calls.linear import check_gate
from tfla_tk.calls.recurrent import RecurrentCore, Slots, check_indices, check_recurrent
from tfla_tk.core.checks import check_bool, check_device, check_int, check_shape, check_tensor, fail, shown
from tfla_tk.core.errors import UnsupportedError
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.ops import recurrent as ops

__all__ = ["fused_recurrent_gated_delta_rule_packed_decode", "fused_sigmoid_gating_delta_rule_update"]

_POOL = "[slots, HV, V, K]"


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    first_index: int = 0,
) -> tuple[Tensor, Tensor]:
    """One token of every sequence by the gated delta rule, with log decay -exp(A_log) softplus(a + dt_bias).

    Args:
        mixed_qkv: [B, 2 H K + HV V], of every sequence q of H heads, k, and v of HV heads side by side, in
            bf16, fp16 or fp32; any stride between sequences.
        a, b: [B, HV], any strides and floating dtype; the writing strength is the sigmoid of b.
        A_log, dt_bias: [HV].
        scale: of q; None is K^-1/2.
        initial_state: a pool [slots, HV, V, K] in fp32, bf16 or fp16, whose states are contiguous.
        out: [B, 1, HV, V], whose rows are contiguous, any floating dtype; it is overwritten.
        ssm_state_indices: [B] int32, which state of the pool is read and overwritten; no two name the same.
            Where an index is below `first_index`, out is 0 and no state is touched.
        use_qk_l2norm_in_kernel: q and k are divided by their norms.
        first_index: of the first state.

    Returns:
        out and initial_state themselves.

    Raises:
        TypeError, ValueError: the message names the argument, what was expected and what came.
        UnsupportedError: no kernel takes the call on this GPU; nothing has been written.
    """
    check_tensor("initial_state", initial_state, 4, _POOL)
    _, value_heads, dim_v, dim_k = initial_state.shape
    check_tensor("mixed_qkv", mixed_qkv, 2, "[B, 2 H K + HV V]")
    batch, width = mixed_qkv.shape
    of_keys = width - value_heads * dim_v
    if of_keys <= 0 or of_keys % (2 * dim_k or 1):
        expected = f"[B, 2 H K + HV V] with K = {dim_k}, HV = {value_heads} and V = {dim_v} of initial_state"
        fail("mixed_qkv", expected, f"{tuple(mixed_qkv.shape)}")
    check_tensor("out", out, 4, "[B, 1, HV, V]")
    check_shape("out", out, (batch, 1, value_heads, dim_v), "[B, 1, HV, V]")
    q, k, v = mixed_qkv[:, None].split([of_keys // 2, of_keys // 2, value_heads * dim_v], dim=-1)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x, dim in ((q, dim_k), (k, dim_k), (v, dim_v)))
    check_indices("ssm_state_indices", ssm_state_indices, initial_state, layout="[B]")
    _serve(
        "fused_recurrent_gated_delta_rule_packed_decode",
        (q, k, v, a, b, A_log, dt_bias, initial_state, None, scale),
        use_qk_l2norm_in_kernel,
        out,
        Slots(ssm_state_indices, None, _first_index(first_index)),
    )
    return out, initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
    *,
    first_index: int = 0,
) -> tuple[Tensor, Tensor]:
    """A few tokens of every sequence by the gated delta rule; log decay -exp(A_log) softplus(a + dt_bias).

    A draft of several tokens is computed before it is known how many of them are accepted. So the state
    behind each of them is kept, and the next call goes on from one of these.

    Args:
        A_log, dt_bias: [HV].
        a, b: [B, T, HV] or [B T, HV], any strides and floating dtype; the writing strength is the sigmoid of
            b.
        q, k: [B, T, H, K], v: [B, T, HV, V] in bf16, fp16 or fp32, with contiguous rows.
        beta, threshold: of the softplus; 1 and 20.
        scale: of q; None is K^-1/2.
        initial_state: a pool [slots, HV, V, K] in fp32, bf16 or fp16, whose states are contiguous.
        inplace_final_state: True.
        cu_seqlens: [N + 1] offsets of N sequences packed in a batch of one, int32 or int64, on the device of
            q. o of tokens behind the last offset is not written.
        ssm_state_indices: int32, with at least N (B) rows. [N]: the state of a sequence, which is read, and
            overwritten by that behind its last token. [N, columns]: the state behind token t of a sequence is
            written where column t says, and column 0 says where the one before its tokens is. No two
            sequences name the same state.
        num_accepted_tokens: int32, at least [N], with indices [N, columns]: the state before the tokens of a
            sequence is in column num_accepted_tokens - 1.
        use_qk_l2norm_in_kernel: q and k are divided by their norms.
        is_kda: False: decays per key channel have no kernel here.
        first_index: of the first state. From the first token on whose state, before or behind it, has an
            index below that or is in no column, o is 0 and no state is touched.

    Returns:
        o [B, T, HV, V] in q's dtype, and initial_state itself.

    Raises:
        TypeError, ValueError, UnsupportedError: as of `fused_recurrent_gated_delta_rule_packed_decode`.
    """
    for name, value, needed in (
        ("beta", beta, 1.0), ("threshold", threshold, 20.0),
        ("inplace_final_state", inplace_final_state, True), ("is_kda", is_kda, False),
    ):  # fmt: skip
        if value != needed:
            fail(name, f"{needed} (call the engine's own function for others)", shown(value))
    check_tensor("q", q, 4, "[B, T, H, K]")
    check_tensor("v", v, 4, "[B, T, HV, V]")
    check_tensor("initial_state", initial_state, 4, _POOL)
    assert initial_state is not None
    sequences = q.shape[0]
    if isinstance(cu_seqlens, Tensor):
        sequences = cu_seqlens.numel() - 1
    accepted = num_accepted_tokens
    of_tokens = isinstance(ssm_state_indices, Tensor) and ssm_state_indices.dim() == 2
    rank, layout = (2, "[N, columns]") if of_tokens else (1, "[N]")
    check_indices("ssm_state_indices", ssm_state_indices, initial_state, rank=rank, layout=layout)
    assert ssm_state_indices is not None
    if of_tokens and ssm_state_indices.shape[1] > 1 and ssm_state_indices.stride(1) != 1:
        fail("ssm_state_indices", "contiguous rows", f"strides {ssm_state_indices.stride()}")
    if accepted is not None:
        if not of_tokens:
            fail("num_accepted_tokens", "None with ssm_state_indices [N]", shown(accepted))
        check_indices("num_accepted_tokens", accepted, initial_state)
        if not accepted.is_contiguous():
            fail("num_accepted_tokens", "a contiguous tensor", f"stride {accepted.stride()}")
        if accepted.shape[0] < sequences:
            fail("num_accepted_tokens", f"at least N = {sequences} numbers", f"{tuple(accepted.shape)}")
    o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    _serve(
        "fused_sigmoid_gating_delta_rule_update",
        (q, k, v, a, b, A_log, dt_bias, initial_state, cu_seqlens, scale),
        use_qk_l2norm_in_kernel,
        o,
        Slots(ssm_state_indices[:sequences], accepted, _first_index(first_index)),
    )
    return o, initial_state


def _first_index(value: Any) -> int:
    first = check_int("first_index", value)
    if first < 0:
        fail("first_index", "0 or more", first)
    return first


def _per_token(name: str, x: Any, q: Tensor, value_heads: int) -> Tensor:
    """a or b as [B, T, HV]."""
    batch, tokens, *_ = q.shape
    if isinstance(x, Tensor) and x.dim() == 2:
        check_shape(name, x, (batch * tokens, value_heads), "[B T, HV]")
        x = x.unflatten(0, (batch, tokens))
    check_gate(name, x, q, (batch, tokens, value_heads))
    return x


def _serve(name: str, given: tuple[Any, ...], qk_l2norm: bool, o: Tensor, slots: Slots) -> None:
    """Check a call, whose scale may be None, and a and b [B T, HV], and serve it. given: the fields of its
    core up to the scale."""
    core = RecurrentCore._make((*given, True, qk_l2norm, True, False, None, True))
    pool, indices = core.initial_state, slots.indices
    assert pool is not None and indices is not None
    if core.dt_bias is None:
        fail("dt_bias", "a tensor [HV]", "None", TypeError)
    if indices.shape[0] != core.sequences:
        expected = f"an index, or a row of them, for each of {core.sequences} sequences"
        fail("ssm_state_indices", expected, f"{tuple(indices.shape)}")
    gates = {
        gate: _per_token(gate, x, core.q, core.v.shape[2]) for gate, x in zip("ab", core[3:5], strict=True)
    }
    core = core._replace(g=gates["a"], beta=gates["b"])
    of_core = {name: getattr(core, name) for name in RecurrentCore._fields[:7]}
    call = check_recurrent(
        partial(check_delta_rule, cu_seqlens_cpu=None),
        **of_core,
        initial_state=pool,
        state_indices=indices[:, 0] if slots.of_tokens else indices,
        inplace=True,
        cu_seqlens=core.cu_seqlens,
        scale=core.scale,
        output_final_state=True,
        use_qk_l2norm_in_kernel=check_bool("use_qk_l2norm_in_kernel", core.qk_l2norm),
        **dict.fromkeys(("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first", "gated"), True),
        allow_neg_eigval=False,
        chunk_size=None,
    )
    check_device("out", o, core.q.device)
    rows: tuple[tuple[str, MaybeTensor], ...] = (("q", core.q), ("k", core.k), ("v", core.v), ("out", o))
    for row, x in rows:
        if x is not None and x.stride(-1) != 1 and x.shape[-1] > 1:
            fail(row, "contiguous rows", f"strides {x.stride()}")
    if call.is_empty:
        return
    if core.q.is_cuda:
        verdict = kernels.supports(call, None)
        if verdict.ok:
            verdict = kernels.load(call)
        if not verdict.ok:
            raise UnsupportedError(name, verdict.reason, verdict.remedy, failed=verdict.failed)
        if not kernels.is_aligned(pool):
            raise UnsupportedError(name, "a state of the pool begins at an address that no kernel reads")
    ops.write(core._replace(scale=call.scale), o, slots)
