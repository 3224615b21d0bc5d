"""A few tokens of the operators in [B, T, H, D] by a recurrence: the call of its kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tfla_tk.core.layout import MaybeTensor

FEW = 8  # tokens that the decoding kernels take


class RecurrentCore(NamedTuple):
    """A call of the kernels; the arguments of the registered op tfla_tk::recurrent in their order.

    Attributes:
        q, k: [B, T, H, K]. v: [B, T, HV, V], q's dtype. Any strides.
        g: log decay [B, T, HV], [HV] or [B, T, H, K]; with A_log what it is made from; None: nothing decays.
        beta: writing strength [B, T, HV], or with beta_sigmoid its logit; None: not the delta rule.
        A_log, dt_bias: [HV]; not None: g is -exp(A_log) softplus(g + dt_bias).
        initial_state: [B, HV, K, V], or [B, HV, V, K] with state_v_first; None: zeros.
        scale: of q.
        qk_l2norm: q and k are x / sqrt(sum x^2 + 1e-6) of those given.
        beta_sigmoid: beta is the sigmoid of the given one, times 2 with neg_eigval.
        output_final_state: the state after the last token is wanted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: MaybeTensor
    beta: MaybeTensor
    A_log: MaybeTensor
    dt_bias: MaybeTensor
    initial_state: MaybeTensor
    scale: float
    state_v_first: bool
    qk_l2norm: bool
    beta_sigmoid: bool
    neg_eigval: bool
    output_final_state: bool

    @property
    def by_channel(self) -> bool:
        """The decay is per key channel."""
        return self.g is not None and self.g.dim() == 4

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Of the states before and after."""
        dims = self.q.shape[-1], self.v.shape[-1]
        return self.q.shape[0], self.v.shape[2], *(dims[::-1] if self.state_v_first else dims)
