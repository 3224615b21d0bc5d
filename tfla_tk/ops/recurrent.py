"""The registered op of a few tokens of the operators in [B, T, H, D]; it has no gradients.

tfla_tk::recurrent takes a `RecurrentCore` and returns (o, last): o [B, T, HV, V] in q's dtype, and the state
after the last token in fp32 (fp64 for fp64 q), [0] where it is not wanted.
tfla_tk::recurrent_ writes o and, over the state it read, the one after the last token, in their dtypes. With
    indices the states lie in a pool [slots, ..], see `Slots`; where there is none, o is 0.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from tfla_tk.calls.delta_rule import DeltaRuleCall, KDACall
from tfla_tk.calls.linear import LinearCall
from tfla_tk.calls.recurrent import RecurrentCore, Slots, through_a_copy
from tfla_tk.core import flops, library, transforms
from tfla_tk.core.layout import MaybeTensor, state_dtype
from tfla_tk.ops import autograd
from tfla_tk.ops.delta_rule import from_raw

_library = library.get()
_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, "
_FLAGS = "float scale, bool state_v_first, bool qk_l2norm, bool beta_sigmoid, bool neg_eigval, "
_FLAGS += "float? lower_bound, "
_library.define(
    f"recurrent({_GIVEN}Tensor? initial_state, Tensor? cu_seqlens, {_FLAGS}bool output_final_state)"
    " -> (Tensor o, Tensor last)"
)
_library.define(
    f"recurrent_({_GIVEN}Tensor(a!) state, Tensor? cu_seqlens, {_FLAGS}Tensor(b!) o, Tensor? indices, "
    "Tensor? accepted, int first) -> ()"
)
_op = torch.ops.tfla_tk.recurrent.default
_op_in_place = torch.ops.tfla_tk.recurrent_.default
_TENSORS = 8
_INPUTS = len(RecurrentCore._fields) - 1  # of the op in place, before o: all but output_final_state


def serve(kernel: str, call: LinearCall, *tensors: Any, direct: bool = False) -> tuple[Tensor, MaybeTensor]:
    """o and the state after the last token, None unless it is wanted. kernel: "simple_gla", "gla",
    "delta_rule" or "kda". tensors: those of its calls; the last one is state_indices. direct: call the
    kernels, not the op."""
    core, state_indices = _core(kernel, call, tensors), tensors[-1]
    if call.state_in_place is not None:
        o = torch.empty_like(core.v, memory_format=torch.contiguous_format)
        write(core, o, Slots(state_indices), direct=direct)
        return o, core.initial_state
    o, last = _on_cuda(*core) if direct else _op(*core)
    return o, last if core.output_final_state else None


def write(core: RecurrentCore, o: Tensor, slots: Slots, *, direct: bool = False) -> None:
    """Overwrite o [B, T, HV, V], whose rows are contiguous, and the states; direct as in `serve`."""
    (_direct_in_place if direct else _op_in_place)(*core[:-1], o, *slots)


def _core(kernel: str, call: LinearCall, tensors: tuple[Any, ...]) -> RecurrentCore:
    q, k, v, g, *more, initial_state, cu_seqlens, _ = tensors
    beta = a_log = dt_bias = None
    if kernel in ("delta_rule", "kda"):
        beta, a_log, dt_bias = more
    elif kernel == "simple_gla" and g is None and more[0] is not None:
        g = more[0].expand(v.shape[:3])
    flags = (False, False, False)
    if isinstance(call, DeltaRuleCall):
        flags = call.qk_l2norm, call.beta_sigmoid, call.neg_eigval
    lower_bound = call.lower_bound if isinstance(call, KDACall) else None
    raw = (a_log, dt_bias) if call.gate == "raw" else (None, None)
    options: tuple[Any, ...] = call.scale, call.state_v_first, *flags, lower_bound, call.output_final_state
    return RecurrentCore(q, k, v, g, beta, *raw, initial_state, cu_seqlens, *options)


def _on_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    import tfla_tk.reference as forms

    core = RecurrentCore(*args)
    made = from_raw(core)
    q, k, g, beta, state = made.q, made.k, made.g, made.beta, made.initial_state
    if core.state_v_first and state is not None:
        state = state.mT
    options: dict[str, Any] = {"scale": core.scale, "initial_state": state, "output_final_state": True}
    options["cu_seqlens"] = core.cu_seqlens
    last: Any
    if beta is not None and g is not None:
        o, last = forms.gated_delta_rule_recurrent(q, k, core.v, g, beta, **options)
    elif beta is not None:
        o, last = forms.delta_rule_recurrent(q, k, core.v, beta, **options)
    elif g is not None and core.by_channel:
        o, last = forms.gla_recurrent(q, k, core.v, g, **options)
    else:
        o, last = forms.simple_gla_recurrent(q, k, core.v, g, **options)
    out = _as_fake(*core)
    out[0].copy_(o)
    if core.output_final_state:
        out[1].copy_(last.mT if core.state_v_first else last)
    return out


def _in_place_on_cpu(*args: Any) -> None:
    core, o, slots = _in_place(args)
    assert core.initial_state is not None

    def new_state(*tensors: Any) -> tuple[Tensor, Tensor]:
        return _on_cpu(*core._replace(initial_state=tensors[0]))

    if slots.of_tokens:
        _token_by_token(core, o, slots)
    else:
        indices = None if slots.indices is None else slots.indices - slots.first
        states = core.initial_state[slots.first :]
        o.copy_(through_a_copy(new_state, 0, states, core.cu_seqlens, indices)[0])


def _token_by_token(core: RecurrentCore, o: Tensor, slots: Slots) -> None:
    """With the state behind every token in a pool, from which that of the next token is read."""
    pool, indices, batch, tokens = core.initial_state, slots.indices, *core.q.shape[:2]
    assert pool is not None and indices is not None
    ends = range(0, batch * tokens + 1, tokens) if core.cu_seqlens is None else core.cu_seqlens.tolist()
    flat = {
        name: None if x is None else x.flatten(0, 1)[None] for name, x in list(core._asdict().items())[:5]
    }
    found, columns = o.flatten(0, 1), indices.shape[1]
    for row, (first, end) in enumerate(itertools.pairwise(ends)):
        column = 0 if slots.accepted is None else int(slots.accepted[row]) - 1
        slot = int(indices[row, column]) if 0 <= column < columns else -1
        for t in range(first, end):
            after = int(indices[row, t - first]) if t - first < columns else -1
            if min(slot, after) < slots.first:
                found[t], slot = 0, -1
                continue
            token: dict[str, Any] = {name: None if x is None else x[:, t : t + 1] for name, x in flat.items()}
            before = pool[slot][None].to(state_dtype(core.q))
            out, last = _on_cpu(*core._replace(**token, cu_seqlens=None, initial_state=before))
            found[t], slot = out[0, 0], after
            pool[slot] = last[0]


def _in_place(args: tuple[Any, ...]) -> tuple[RecurrentCore, Tensor, Slots]:
    return RecurrentCore(*(*args[:_INPUTS], True)), args[_INPUTS], Slots(*args[_INPUTS + 1 :])


def _on_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    from tfla_tk.backends.tk import recurrent

    return recurrent.launch(RecurrentCore(*args))


def _in_place_on_cuda(*args: Any) -> None:
    from tfla_tk.backends.tk import recurrent

    recurrent.launch_in_place(*_in_place(args))


def _written(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return args[7], args[_INPUTS]


_direct_in_place = autograd.noting_writes(_in_place_on_cuda, _written)


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise RuntimeError("vmap of a recurrence in place: expected inplace=False, got True")


def _as_fake(*args: Any) -> tuple[Tensor, Tensor]:
    core = RecurrentCore(*args)
    shape = core.state_shape if core.output_final_state else (0,)
    return core.q.new_empty(core.v.shape), core.q.new_empty(shape, dtype=state_dtype(core.q))


_library.impl("recurrent", _on_cpu, "CPU")
_library.impl("recurrent", _on_cuda, "CUDA")
_library.register_fake("recurrent", _as_fake)
_library.impl("recurrent", autograd.without_gradients("recurrent", _op, _TENSORS), "Autograd")
_vmap = transforms.merge_into_batch(
    _op, cu_seqlens=8, heads=(2, 2, 2, 2, 2, 0, 0, 1), result_heads=(2, 1), per_head=(5, 6)
)
_library.register_vmap("recurrent", _vmap)
flops.register("recurrent", flops.step)
_library.impl("recurrent_", _in_place_on_cpu, "CPU")
_library.impl("recurrent_", _in_place_on_cuda, "CUDA")
_library.register_fake("recurrent_", lambda *args: None)
_library.impl("recurrent_", autograd.without_gradients("recurrent_", _op_in_place, _TENSORS), "Autograd")
_library.impl(
    "recurrent_", autograd.noting_writes(autograd.below_versions(_op_in_place), _written), "ADInplaceOrView"
)
_library.register_vmap("recurrent_", _refuse_vmap)
flops.register("recurrent_", flops.step)
