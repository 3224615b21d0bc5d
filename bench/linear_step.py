"""One token of the linear operators for `python -m tfla_tk.bench step`, against FLA's step and the copy rate.

A call makes T steps, each on an fp32 state of its own, of more than STATE_BYTES in all: no state is left in
the L2 cache. The variant "v_first" has its states [V, K], as engines and most of FLA's layers keep them.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tfla_tk import reference

from . import fla
from .inputs import Sizes, draw_steps, made_once
from .operators import Operator
from .results import STEP_OF, V_FIRST
from .shapes import Shape

STATE_BYTES = 2e8
BATCHES = 1, 8, 64, 256
# of the public functions, in the order of the inputs
GATES: dict[str, tuple[str, ...]] = {"gated_delta_rule": ("g", "beta"), "gla": ("gk",), "simple_gla": ("g",)}
GATES |= {"delta_rule": ("beta",), "kda": ("g", "beta")}
BY_CHANNEL = ("gla", "kda")  # their first gate: a number for every channel of a key
# heads, K, V, heads of v: Qwen3-Next and OLMo-hybrid, GLA-1.3B, small models, Kimi-Linear
MODELS = {
    "gated_delta_rule": ((16, 128, 128, 32), (30, 96, 192, 30)),
    "gla": ((4, 256, 512, 4),),
    "simple_gla": ((16, 128, 128, 16),),
    "delta_rule": ((16, 128, 128, 16),),
    "kda": ((32, 128, 128, 32),),
}
L2NORM = {"use_qk_l2norm_in_kernel": True}


def inputs(
    op: str, shape: Shape, dtype: torch.dtype, device: torch.device, layout: str, seed: int, bias: float
) -> dict[str, Tensor]:
    """q, k, v in dtype, gates and states in fp32, of T steps: [B, H, T, ...], those of a step contiguous.
    layout and bias mean nothing."""
    values, wide, gates = shape.value_heads, torch.promote_types(dtype, torch.float32), GATES[op]
    sizes: Sizes = dict.fromkeys("qk", ((shape.H, shape.K), dtype))
    sizes |= {"v": ((values, shape.V), dtype), **dict.fromkeys(gates, ((values,), wide))}
    if op in BY_CHANNEL:
        sizes[gates[0]] = (values, shape.K), wide
    sizes["state"] = (values, shape.K, shape.V), wide
    found = draw_steps(sizes, shape, device, seed)
    for gate in gates:
        drawn = found[gate]
        drawn.copy_(torch.sigmoid(drawn) if gate == "beta" else logsigmoid(drawn + 2))
    return found


class LinearStep(Operator):
    """T steps of one token. Their new states are kept until the end, so that each is written to memory."""

    def call(self, backend: str, *tensors: Tensor, **named: Any) -> Tensor:
        """o [B, HV, T, V] of a backend of the public function or of FLA's, with states [K, V], or [V, K]."""
        *tokens, state = tensors
        backend, v_first, _ = backend.partition(V_FIRST)
        options: dict[str, Any] = dict(self.options)
        if v_first:
            (state,), options["state_v_first"] = made_once(_transposed, state), True
        function = self.function_of(backend)
        outputs, states = [], []
        for *of_token, before in zip(*(x.unbind(2) for x in (*tokens, state)), strict=True):
            q, k, v, *rest = (x[:, None] for x in of_token)
            given = dict(zip(self.gates, rest, strict=True))
            o, after = function(q, k, v, **given, **options, initial_state=before, output_final_state=True)
            outputs.append(o[:, 0])
            states.append(after)
        return torch.stack(outputs, dim=2)


def _transposed(states: Tensor) -> Tensor:
    return states.mT.contiguous()


def truth(*, op: str, chunk_size: int, use_qk_l2norm_in_kernel: bool = False, **tensors: Tensor) -> Tensor:
    """o [B, HV, T, V] of the recurrence."""
    batch, _, steps, _ = tensors["q"].shape
    of_steps = {name: x.movedim(2, 1).flatten(0, 1) for name, x in tensors.items()}
    state = of_steps.pop("state")
    q, k, v, *gates = (x[:, None] for x in of_steps.values())
    if use_qk_l2norm_in_kernel:
        q, k = reference.l2_norm(q), reference.l2_norm(k)
    o, _ = getattr(reference, f"{op}_recurrent")(q, k, v, *gates, initial_state=state)
    return o[:, 0].unflatten(0, (batch, steps)).movedim(1, 2)


def shapes_of(op: str) -> tuple[Shape, ...]:
    """Each model with each of BATCHES, and as many steps as fill STATE_BYTES."""
    return tuple(
        Shape(batch, math.ceil(STATE_BYTES / (batch * values * k * v * 4)), heads, k, v, HV=values)
        for heads, k, v, values in MODELS[op]
        for batch in BATCHES
    )


def kernels_of(op: str) -> list[str]:
    """The kernels and FLA's, with states [K, V] and, where the function has it, [V, K]."""
    layouts = ("", V_FIRST)[: 1 + (op != "delta_rule")]
    return [name + layout for layout in layouts for name in ("tk", fla.VARIANT)]


OPERATORS: dict[str, Operator] = {
    op: LinearStep(
        STEP_OF[op],
        f"fused_recurrent_{op}",
        partial(inputs, op),
        partial(truth, op=op),
        options=L2NORM if "beta" in gates else {},
        output="o",
        gates=gates,
        states={},
        has_value_heads=op in ("gated_delta_rule", "kda"),
        runs_in_graphs=True,
    )
    for op, gates in GATES.items()
}
