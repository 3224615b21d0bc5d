"""The inputs of the delta rule from raw ones, and the gradients of these: a kernel in front of the forward,
one behind the backward.

The forward's kernel makes in one launch what the flags ask for: q and k of norm 1, rounded to their dtype,
the sigmoid of beta and the log decay in fp32. The backward makes them again by the same kernel, so that
between the two there are the raw inputs alone, which autograd has anyway. Kept, the normalised q and k would
take 4 K bytes per token and head for as long; the peak of the backward itself is the same.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk import prepared
from tfla_tk.backends.tk.delta_rule import support as kernels
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.backends.tk.prepared import NO_GATE, NO_OPERAND, current_stream, operand_at, starts
from tfla_tk.build import instances
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import MaybeTensor, as_dtype


class Wanted(NamedTuple):
    """What is to be made of a call's inputs."""

    norm: bool
    strength: bool
    decay: bool

    @staticmethod
    def of(core: DeltaRuleCore) -> "Wanted":
        return Wanted(core.qk_l2norm, core.beta_sigmoid, core.g is not None and core.A_log is not None)


class Inputs:
    """What is made of the inputs of calls whose tensors lie alike. given: q and k as the made ones lie
    like them, where a TMA descriptor can address these. core: as `readable` leaves it. wanted: something."""

    def __init__(self, given: DeltaRuleCore, core: DeltaRuleCore, wanted: Wanted) -> None:
        shape, self._wanted = Shape.of(core), wanted
        self._device = shape.device
        # nothing is left to be made
        self._options = core.scale, False, False, False, core.batch_invariant
        kernel = build.load(instances.DELTA_RULE, kernels.of_inputs(shape, backward=False))
        at, addresses = prepared.number(core)
        of_units = [(addresses.next(given=wanted.norm), x) for x in (given.q, given.k)]
        unit_q, unit_k = (
            operand_at(address, prepared.writable(torch.empty_like(x, device="meta")))
            if address
            else NO_OPERAND
            for address, x in of_units
        )
        strength, log_decay = addresses.next(given=wanted.strength), addresses.next(given=wanted.decay)
        q, k, gates = _raw(at, core, wanted)
        self._run = build.launches(
            [
                kernel.inputs(
                    shape.with_offsets(0), q, k, unit_q, unit_k, *gates, strength, log_decay, core.neg_eigval
                )
            ]
        )

    def __call__(self, given: DeltaRuleCore, core: DeltaRuleCore) -> DeltaRuleCore:
        """The call, as kernels read it, with what its inputs are made into."""
        q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens = tensors = core[:9]
        unit_q = unit_k = strength = log_decay = None
        if self._wanted.norm:
            q = unit_q = prepared.writable(torch.empty_like(given.q))
            k = unit_k = prepared.writable(torch.empty_like(given.k))
        if self._wanted.strength:
            beta = strength = _floats_like(beta)
        if self._wanted.decay:
            assert g is not None
            g = log_decay = _floats_like(g)
            a_log = dt_bias = None
        at = starts(*tensors, unit_q, unit_k, strength, log_decay)
        self._run(at, current_stream(self._device))
        made = q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens
        return DeltaRuleCore._make((*made, *self._options))

    def given(self, core: DeltaRuleCore, made: DeltaRuleCore) -> DeltaRuleCore:
        """The call as the gradients of what its inputs are made into are like it."""
        norm, strength, decay = self._wanted
        return made._replace(
            q=made.q if norm else core.q,
            k=made.k if norm else core.k,
            v=core.v,
            g=made.g if decay else core.g,
            beta=made.beta if strength else core.beta,
            initial_state=core.initial_state,
        )


class Gradients:
    """The gradients of the raw inputs of calls whose tensors lie alike. given: the call as its gradients
    are like. core: as `readable` leaves it. found: the gradients of what the inputs are made into."""

    def __init__(
        self, given: DeltaRuleCore, core: DeltaRuleCore, found: tuple[MaybeTensor, ...], wanted: Wanted
    ) -> None:
        shape, self._wanted = Shape.of(core), wanted
        self._device = shape.device
        kernel = build.load(instances.DELTA_RULE, kernels.of_inputs(shape, backward=True))
        parts = -(-shape.batch * shape.seq // kernel.INPUT_TOKENS)
        self._sums_shape = (2, parts, shape.heads)
        at, addresses = prepared.number(core)
        of_q, of_k = (addresses.next(given=wanted.norm) for _ in range(2))
        d_strength, d_beta = (addresses.next(given=wanted.strength) for _ in range(2))
        d_log_decay, d_g, sums = (addresses.next(given=wanted.decay) for _ in range(3))
        dq, dk = (
            operand_at(address, x) if wanted.norm and x is not None else NO_OPERAND
            for address, x in ((of_q, found[0]), (of_k, found[1]))
        )
        q, k, gates = _raw(at, core, wanted)
        written = (
            prepared.gate_at(d_beta, torch.empty_like(given.beta, device="meta"))
            if wanted.strength
            else NO_GATE,
            prepared.gate_at(d_g, torch.empty_like(given.g, device="meta"))
            if wanted.decay and given.g is not None
            else NO_GATE,
        )
        self._run = build.launches(
            [
                kernel.inputs_backward(
                    shape.with_offsets(0), q, k, dq, dk, *gates, d_strength, d_log_decay, *written, sums,
                    core.neg_eigval,
                )
            ],
        )  # fmt: skip

    def __call__(
        self, given: DeltaRuleCore, core: DeltaRuleCore, found: tuple[MaybeTensor, ...]
    ) -> tuple[MaybeTensor, ...]:
        dq, dk, dv, d_log_decay, d_strength, *_, dh0 = found
        dg, dbeta, sums = d_log_decay, d_strength, None
        if self._wanted.strength:
            dbeta = torch.empty_like(given.beta)
        if self._wanted.decay:
            assert given.g is not None
            dg, sums = torch.empty_like(given.g), core.v.new_empty(self._sums_shape, dtype=torch.float32)
        # those that the kernel leaves alone have numbers, too, which no launch looks at
        self._run(
            starts(*core[:9], dq, dk, d_strength, dbeta, d_log_decay, dg, sums), current_stream(self._device)
        )
        if self._wanted.norm:
            dq, dk = _like(given.q, dq), _like(given.k, dk)
        da_log, ddt_bias = (
            None if x is None or sums is None else as_dtype(torch.sum(sums[place], dim=0), x.dtype)
            for place, x in enumerate((given.A_log, given.dt_bias))
        )
        return dq, dk, dv, dg, dbeta, da_log, ddt_bias, dh0


def _raw(
    at: Any, core: DeltaRuleCore, wanted: Wanted
) -> tuple[
    prepared.Operand, prepared.Operand, tuple[prepared.Gate, prepared.Gate, prepared.Gate, prepared.Gate]
]:
    """q and k, and beta, g, A_log and dt_bias, at prepared addresses; none where nothing is made of them."""
    q, k = (
        operand_at(*x) if wanted.norm else NO_OPERAND for x in ((at.q, core.q), (at.k, core.k))
    )  # fmt: skip
    beta = prepared.gate_at(at.beta, core.beta) if wanted.strength else NO_GATE
    if not wanted.decay:
        return q, k, (beta, NO_GATE, NO_GATE, NO_GATE)
    of_heads = prepared.per_head_at(at.A_log, core.A_log), prepared.per_head_at(at.dt_bias, core.dt_bias)
    return q, k, (beta, prepared.gate_at(at.g, core.g), *of_heads)


def _floats_like(x: Tensor) -> Tensor:
    """Uninitialised, fp32 and contiguous, of x's size."""
    return x.new_empty(x.shape, dtype=torch.float32)


def _like(given: Tensor, gradient: MaybeTensor) -> MaybeTensor:
    """The gradient as it is, where it lies like what was given, else a copy that does."""
    assert gradient is not None
    like = torch.empty_like(given, device="meta")
    return gradient if prepared.writable(like) is like else torch.empty_like(given).copy_(gradient)
