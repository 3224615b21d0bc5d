"""DeltaNet and gated DeltaNet: the public functions.

Signatures follow fla 0.6.0's; of its further keywords use_gate_in_kernel, A_log, dt_bias and chunk_size are
taken.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tfla_tk.calls.delta_rule import check_delta_rule
from tfla_tk.calls.linear import check_same_offsets
from tfla_tk.core.checks import fail
from tfla_tk.core.dispatch import CallPath, operator

TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu")
_OPTIONS = (
    *("scale", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel"),
    *("use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first", "chunk_size", "gated", "backend"),
)
_path = CallPath("delta_rule", TENSORS, _OPTIONS, check_delta_rule)


@operator
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The delta rule (DeltaNet), chunkwise.

    Per head, with writing strength beta_t and scale s::

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T
        o_t = s q_t^T S_t

    Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2024).

    The state is stable for keys of norm 1 and beta from 0 to 2: give normalised keys or set
    use_qk_l2norm_in_kernel. Other keys are computed as given; where beta |k|^2 exceeds 2 the state grows.

    Arguments, result, errors and the choice of the backend as in `chunk_gated_delta_rule`, without decay:
    beta is [B, T, HV].
    """
    check_same_offsets(cu_seqlens, cu_seqlens_cpu)
    flags = use_qk_l2norm_in_kernel, False, False, False
    return _path.serve(
        "chunk_delta_rule",
        (q, k, v, None, beta, None, None, initial_state, cu_seqlens, cu_seqlens_cpu),
        (scale, output_final_state, *flags, False, chunk_size, False, backend),
    )


@operator
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule (gated DeltaNet), chunkwise.

    Per head, with log decay g_t, writing strength beta_t and scale s::

        S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T
        o_t = s q_t^T S_t

    Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2025).

    Gradients reach q, k, v, g, beta, A_log, dt_bias and initial_state as they were given. The state is stable
    for keys of norm 1 and beta from 0 to 2: give normalised keys or set use_qk_l2norm_in_kernel. Other keys,
    and positive log decays, are computed as given; the state may grow and overflow. The tk kernels take bf16
    and fp16, K up to 256 and V up to 512.

    Args:
        q, k: queries and keys [B, T, H, K], any view, of one dtype: float16, bfloat16, float32 or float64.
        v: values [B, T, HV, V], q's dtype. HV = n H; head h of v reads head h // n of q and k.
        g: natural log of the decay per token [B, T, HV], any floating dtype (fp32 is best); with
            use_gate_in_kernel what it is made from.
        beta: writing strength [B, T, HV], any floating dtype, or with use_beta_sigmoid_in_kernel its logit.
        scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu: as in
            `chunk_simple_gla`.
        use_qk_l2norm_in_kernel: take x / sqrt(sum x^2 + 1e-6) of q and of k in their place.
        use_beta_sigmoid_in_kernel: take sigmoid(beta) in place of beta.
        allow_neg_eigval: take 2 sigmoid(beta); with use_beta_sigmoid_in_kernel only.
        chunk_indices: not used; fla's own functions hand it to one another.
        cp_context: None: there is no context parallelism.
        use_gate_in_kernel: take -exp(A_log) softplus(g + dt_bias) in place of g.
        A_log, dt_bias: [HV], any floating dtype; dt_bias may be None. Not looked at without
            use_gate_in_kernel.
        chunk_size: tokens per chunk, 16, 32 or 64; None is 64. The result does not depend on it beyond
            rounding. Used by the reference and by fla; the tk kernels choose their own.
        backend: as in `chunk_simple_gla`.

    Returns:
        (o, final_state) as in `chunk_simple_gla`: o [B, T, HV, V] in q's dtype, final_state shaped like
        initial_state in fp32 (fp64 for fp64 q, k, v), or None without output_final_state.

    Raises:
        TypeError, ValueError, UnsupportedError: as in `chunk_simple_gla`.
    """
    if cp_context is not None:
        check_no_context(cp_context)
    check_same_offsets(cu_seqlens, cu_seqlens_cpu)
    flags = use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    return _path.serve(
        "chunk_gated_delta_rule",
        (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu),
        (scale, output_final_state, *flags, state_v_first, chunk_size, True, backend),
    )


def checking(function: Callable[..., Any], path: CallPath, **fixed: Any) -> Callable[..., None]:
    """Of a public function with cp_context a function of the same arguments, which checks that the call would
    be served; nothing is computed. It raises what the call would. path: of its calls. fixed: what the path
    takes beside the arguments."""
    signature = inspect.signature(function)
    names = signature.parameters
    defaults = {name: each.default for name, each in names.items() if each.default is not each.empty}

    def check(*args: Any, **kwargs: Any) -> None:
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        if arguments.keys() != names.keys():
            # the TypeError for what is missing or unknown
            signature.bind(*args, **kwargs)
        check_no_context(arguments["cp_context"])
        arguments |= fixed
        tensors, options = (tuple(arguments[x] for x in of) for of in (path.tensors, path.options))
        path.plan(function.__name__, tensors, options)

    return check


def check_no_context(cp_context: Any) -> None:
    """ValueError for anything but None."""
    if cp_context is not None:
        expected = "None (context parallelism is fla's own: call its function)"
        fail("cp_context", expected, type(cp_context).__name__)


check_gated_delta_rule = checking(chunk_gated_delta_rule, _path, gated=True)
