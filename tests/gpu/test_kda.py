"""KDA's kernels on the GPU: against the recurrence in fp64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

from tfla_tk import UnsupportedError
from tfla_tk.backends.tk.kda.call import MOST_TRAINED_V, Call, Shape
from tfla_tk.backends.tk.kda.launch import backward, forward, forward_of

from .linear import (
    Normal,
    Tensors,
    assert_accurate,
    assert_equal,
    assert_graph_replays,
    assert_whole_and_repeated,
    draw_cotangents,
    draw_operands,
    pack,
)
from .memory import LENGTHS, fuse, odd_rows, relayout, shifted, transposed

DIMS = [(128, 128), (64, 64), (64, 128), (128, 64), (128, 256), (64, 512)]
PADDED = [(16, 16), (96, 80), (48, 192), (112, 112)]
GATES = [
    *("usual", "model's", "bounded", "0", "-1e-4", "-50", "-1e3", "-1e5", "-inf"),
    *("mixed", "by channel", "growing"),
]
# what is made of raw inputs: of g, and of the others
RAW_GATES = {
    "softplus": {"A_log": True},
    "softplus and bias": {"A_log": True, "dt_bias": True},
    "bounded": {"lower_bound": -5.0},
    "bounded with a rate": {"A_log": True, "dt_bias": True, "lower_bound": -5.0},
}
FLAGS = [
    {"qk_l2norm": True, "beta_sigmoid": True},
    {"beta_sigmoid": True, "neg_eigval": True},
    {"qk_l2norm": True},
]
MILD_BITS = 80.0  # kMildBits in kda/matrices/config.cuh

of_dims = pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids="{0[0]}_{0[1]}".format)
of_gate_dtypes = pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(params=[1, 2], ids=["one walker", "two walkers"])
def walkers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, new_calls: None) -> int:
    """Of a CTA of the walk, whatever the call's sizes ask for."""
    monkeypatch.setattr(Shape, "walkers", request.param)
    return request.param


def draw_gates(kind: str, normal: Normal, *shape: int) -> Tensor:
    chosen = normal.uniform(*shape)
    full = torch.full(shape, 0.0, device="cuda")
    if kind in ("0", "-1e-4", "-50", "-1e3", "-1e5", "-inf"):
        return full + float(kind)
    return {
        "usual": lambda: logsigmoid(normal(*shape) + 3),
        # as Kimi Linear's are at first: rates of 1 to 16, steps of 1e-3 to 0.1
        "model's": lambda: -torch.exp(math.log(16) * normal.uniform(shape[2], 1) - 4.6 * chosen - 2.3),
        "bounded": lambda: -5 * torch.sigmoid(2 * normal(*shape)),
        "mixed": lambda: (
            (-0.05 * normal.uniform(*shape))
            .where(chosen < 0.9, -1e3)
            .where(chosen > 0.05, -50.0)
            .where(chosen < 0.8, -1e5)
            .where(chosen > 0.3, 0.0)
        ),
        "by channel": lambda: full.new_tensor([0.0, -1e-4, -50.0, -1e3]).repeat(*shape[:3], shape[3] // 4),
        "growing": lambda: 0.01 * normal(*shape),
    }[kind]()


def draw(
    batch: int = 2,
    seq: int = 300,
    heads: int = 2,
    value_heads: int | None = None,
    dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    gates: str = "usual",
    of_gates: torch.dtype = torch.float32,
    states: bool = True,
    sequences: int | None = None,
    v_first: bool = False,
) -> Tensors:
    """q and k of norm 1, v, g, beta and, on request, an initial state, [B, T, H, D]."""
    normal = Normal(0)
    value_heads = heads if value_heads is None else value_heads
    found = draw_operands(normal, batch, seq, heads, value_heads, dims, dtype, unit=True)
    found["g"] = draw_gates(gates, normal, batch, seq, value_heads, dims[0]).to(of_gates)
    found["beta"] = torch.sigmoid(normal(batch, seq, value_heads)).to(of_gates)
    if states:
        of_state = dims[::-1] if v_first else dims
        found["initial_state"] = normal(batch if sequences is None else sequences, value_heads, *of_state)
    return found


def run(x: Tensors, **options: Any) -> Tensors:
    options.setdefault("scale", x["q"].shape[-1] ** -0.5)
    o, last = forward(**x, output_final_state=True, **options)
    assert last is not None
    return {"o": o, "final_state": last}


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Of [B, T, H, D] and a state [B, H, K, V]."""
    rows = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        read = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        update = beta[:, t].unsqueeze(-1) * (v[:, t] - read)
        state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return (torch.stack(rows, 1) if rows else torch.zeros_like(v)), state


def truth_of(
    x: Tensors,
    *,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    neg_eigval: bool = False,
    state_v_first: bool = False,
) -> Tensors:
    """`run` in fp64."""
    q, k, v, g, beta = (x[name].double() for name in ("q", "k", "v", "g", "beta"))
    value_heads = v.shape[2]
    if qk_l2norm:
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    q, k = (t.repeat_interleave(value_heads // t.shape[2], 2) for t in (q, k))
    if "dt_bias" in x:
        g = g + x["dt_bias"].double().view(value_heads, -1)
    rate = x["A_log"].double().exp().unsqueeze(-1) if "A_log" in x else 1.0
    if lower_bound is not None:
        g = lower_bound * torch.sigmoid(rate * g)
    elif "A_log" in x:
        g = -rate * softplus(g)
    if beta_sigmoid:
        beta = torch.sigmoid(beta) * (2 if neg_eigval else 1)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    offsets = x["cu_seqlens"].tolist() if "cu_seqlens" in x else None
    sequences = v.shape[0] if offsets is None else len(offsets) - 1
    state = x.get("initial_state", v.new_zeros(sequences, value_heads, q.shape[-1], v.shape[-1])).double()
    if state_v_first and "initial_state" in x:
        state = state.mT
    tokens = q, k, v, g, beta
    if offsets is None:
        o, last = recurrence(*tokens, state)
    else:
        lengths = [end - start for start, end in itertools.pairwise(offsets)]
        parts = zip(*(t.split(lengths, 1) for t in tokens), state.split(1), strict=True)
        found = [recurrence(*part) for part in parts]
        o, last = torch.cat([y for y, _ in found], 1), torch.cat([s for _, s in found])
    return {"o": o, "final_state": last.mT if state_v_first else last}


def check(x: Tensors, **options: Any) -> None:
    assert_accurate(run(x, **options), truth_of(x, **options), x["q"].dtype)


def draw_raw(of_gates: torch.dtype, names: dict[str, Any], **sizes: Any) -> tuple[Tensors, dict[str, Any]]:
    """q, k, g and beta as projections leave them, and parameters; what `names` has of options."""
    x = draw(of_gates=of_gates, **sizes)
    normal, value_heads, dim_k = Normal(1), x["v"].shape[2], x["q"].shape[3]
    raw = ("q", "k", "g", *(["beta"] if names.get("beta_sigmoid") else []))
    x |= {name: (3 * normal(*x[name].shape)).to(x[name].dtype) for name in raw}
    if names.get("A_log"):
        x["A_log"] = math.log(16) * normal.uniform(value_heads)
    if names.get("dt_bias"):
        x["dt_bias"] = normal(value_heads * dim_k) - 4
    return x, {name: value for name, value in names.items() if name not in x}


@pytest.mark.parametrize("dims", [*DIMS, *PADDED], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
def test_all_dims(states: bool, dims: tuple[int, int], dtype: torch.dtype, walkers: int) -> None:
    check(draw(dims=dims, dtype=dtype, states=states))


@of_dims
@pytest.mark.parametrize("seq", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 320, 1000])
def test_any_length(seq: int, dims: tuple[int, int], dtype: torch.dtype, walkers: int) -> None:
    # of few tokens many heads: the error of a few numbers is a matter of chance
    check(draw(1, seq, max(2, 32 // seq), dims=dims, dtype=dtype))


@of_dims
@of_gate_dtypes
@pytest.mark.parametrize("gates", GATES)
def test_gates(
    gates: str, of_gates: torch.dtype, dims: tuple[int, int], dtype: torch.dtype, walkers: int
) -> None:
    if of_gates == torch.float16 and gates == "-1e5":
        gates = "-inf"
    check(draw(dims=dims, dtype=dtype, gates=gates, of_gates=of_gates))


@of_dims
@pytest.mark.parametrize("times", [0.99, 1.01, None], ids=["mild", "hard", "by turns"])
def test_gates_where_the_form_of_scores_changes(
    times: float | None, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """Sums over eight tokens beside what counts as mild; None: by turns."""
    x = draw(1, 512, dims=dims, dtype=dtype)
    sides = torch.rand_like(x["g"]).reshape(1, -1, 8, 2, dims[0])
    sides *= -MILD_BITS * math.log(2) / sides.sum(2, keepdim=True)
    if times is None:
        hard = torch.arange(sides.shape[1], device="cuda") // 2 % 2 == 1
        sides *= torch.where(hard, 1.5, 0.5)[None, :, None, None, None]
    else:
        sides *= times
    x["g"] = sides.reshape(x["g"].shape)
    check(x)


@of_gate_dtypes
@pytest.mark.parametrize("raw", RAW_GATES)
@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (96, 80)], ids="{0[0]}_{0[1]}".format)
def test_raw_inputs(
    dims: tuple[int, int], flags: dict[str, bool], raw: str, of_gates: torch.dtype, dtype: torch.dtype
) -> None:
    x, options = draw_raw(of_gates, RAW_GATES[raw] | flags, dims=dims, dtype=dtype, value_heads=4)
    if not flags.get("qk_l2norm"):
        x |= {name: normalize(x[name].float(), dim=-1).to(dtype) for name in ("q", "k")}
    check(x, **options)


def test_raw_gates_that_hardly_decay() -> None:
    """softplus of numbers far below 0, whose logarithm of 1 + e^g would have lost them."""
    x, options = draw_raw(torch.float32, {"A_log": True}, batch=1, seq=2000, gates="usual")
    x["g"] = x["g"] - 12
    x |= {name: normalize(x[name].float(), dim=-1).bfloat16() for name in ("q", "k")}
    check(x | {"beta": 0.02 * x["beta"]}, **options)


@of_dims
@pytest.mark.parametrize("heads", [(2, 6), (1, 4), (3, 3)], ids="{0[0]}_{0[1]}".format)
def test_heads(heads: tuple[int, int], dims: tuple[int, int], walkers: int) -> None:
    """Neighbouring heads of v share a head of q and k."""
    check(draw(heads=heads[0], value_heads=heads[1], dims=dims))


@of_dims
def test_many_heads(dims: tuple[int, int], walkers: int) -> None:
    """More CTAs than run at once."""
    check(draw(3, 130, 48, dims=dims, gates="bounded", of_gates=torch.bfloat16))


@of_dims
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize("gates", ["usual", "mixed"])
def test_packed(gates: str, v_first: bool, offsets: torch.dtype, dims: tuple[int, int], walkers: int) -> None:
    sizes = {"batch": 1, "seq": sum(LENGTHS), "sequences": len(LENGTHS), "dims": dims, "v_first": v_first}
    x = pack(draw(gates=gates, of_gates=torch.bfloat16, **sizes), offsets)
    check(x, state_v_first=v_first)


def test_packed_sequences_are_bitwise_those_alone() -> None:
    """Also beside a sequence of NaN."""
    lengths = [70, 1, 64, 0, 201]
    sizes = {"batch": 1, "seq": sum(lengths), "sequences": len(lengths)}
    x, options = draw_raw(torch.bfloat16, RAW_GATES["softplus and bias"] | FLAGS[0], **sizes)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, :70] = torch.nan
    found = run(pack(x, lengths=lengths), **options)
    tokens = {name: x[name].split(lengths, 1) for name in ("q", "k", "v", "g", "beta")}
    for n in range(1, len(lengths)):
        alone = {name: parts[n] for name, parts in tokens.items()}
        alone |= {
            "initial_state": x["initial_state"][n : n + 1],
            "A_log": x["A_log"],
            "dt_bias": x["dt_bias"],
        }
        expected = run(alone, **options) if lengths[n] else None
        of_sequence = found["o"].split(lengths, 1)[n], found["final_state"][n : n + 1]
        if expected is None:
            assert torch.equal(of_sequence[1], alone["initial_state"])
        else:
            assert_equal(dict(zip(expected, of_sequence, strict=True)), expected)


def test_v_first_is_the_transpose() -> None:
    x = draw()
    expected = run(x)
    found = run(x | {"initial_state": x["initial_state"].mT.contiguous()}, state_v_first=True)
    assert_equal(found | {"final_state": found["final_state"].mT}, expected)


@pytest.mark.parametrize("layout", [transposed, shifted, odd_rows, "fused"])
def test_views(layout: Any) -> None:
    """Read as they lie, or copied where TMA cannot read them."""
    x = draw(dims=(128, 128), of_gates=torch.bfloat16)
    expected = run(x)
    operands = {name: x[name] for name in ("q", "k", "v", "g")}
    views = fuse(operands) if layout == "fused" else relayout(operands, layout) | {"g": layout(x["g"])}
    assert_equal(run(x | views), expected)


def test_no_final_state_and_no_scale() -> None:
    x = draw()
    o, last = forward(**x, scale=-0.3)
    assert last is None
    assert_accurate({"o": o}, {"o": truth_of(x, scale=-0.3)["o"]}, torch.bfloat16)


@of_dims
@pytest.mark.parametrize("gates", ["usual", "mixed"])
def test_results_are_whole_and_repeat(gates: str, dims: tuple[int, int], walkers: int) -> None:
    x = draw(3, 500, 4, dims=dims, gates=gates)
    assert_whole_and_repeated(lambda: run(x))


def test_in_a_graph() -> None:
    x, options = draw_raw(torch.bfloat16, RAW_GATES["softplus and bias"] | FLAGS[0])
    other = {name: t.flip(0) for name, t in x.items()}
    expected = [run(other, **options), run(x, **options)]
    assert_graph_replays(lambda x: run(x, **options), x, other, expected, 6)


@pytest.mark.sanitize
@of_dims
@pytest.mark.parametrize("gates", ["usual", "mixed"])
def test_small_calls(gates: str, dims: tuple[int, int], walkers: int) -> None:
    """Every place of every ring is used twice at least."""
    check(draw(1, 450, 2, dims=dims, gates=gates))


@pytest.mark.sanitize
def test_small_packed_calls_of_raw_inputs(walkers: int) -> None:
    lengths = [70, 0, 1, 64, 100]
    sizes = {"batch": 1, "seq": sum(lengths), "sequences": len(lengths), "dims": (96, 80)}
    x, options = draw_raw(torch.bfloat16, RAW_GATES["softplus and bias"] | FLAGS[0], **sizes)
    check(pack(x, lengths=lengths), **options)


# Gradients

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
TRAINED = [dims for dims in (*DIMS, *PADDED) if dims[1] <= MOST_TRAINED_V]


def call_of(
    x: Tensors,
    *,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    neg_eigval: bool = False,
    state_v_first: bool = False,
) -> Call:
    scale = x["q"].shape[-1] ** -0.5 if scale is None else scale
    tensors = (x.get(name) for name in (*INPUTS, "cu_seqlens"))
    return Call(*tensors, scale, lower_bound, qk_l2norm, beta_sigmoid, neg_eigval, state_v_first)


def train(x: Tensors, given: list[Tensor] | None = None, *, keep: bool = True, **options: Any) -> Tensors:
    """The gradients of all inputs, from gradients of o and of the last state.

    Args:
        keep: the forward keeps what the backward reads; else the backward makes it again.
    """
    call = call_of(x, **options)
    o, last, kept = forward_of(call, output_final_state=True, keep=keep)
    assert (kept is not None) == keep and last is not None
    given = draw_cotangents({"o": o, "final_state": last}) if given is None else given
    found = dict(zip(INPUTS, backward(call, kept, *given), strict=True))
    assert all((found[name] is None) == (name not in x) for name in INPUTS)
    return {f"d{name}": grad for name, grad in found.items() if grad is not None}


def true_gradients(x: Tensors, **options: Any) -> Tensors:
    """`train` in fp64."""
    leaves = {name: x[name].double().requires_grad_() for name in INPUTS if name in x}
    outputs = truth_of(x | leaves, **options)
    given = draw_cotangents(outputs)
    grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), given)
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def check_gradients(x: Tensors, **options: Any) -> None:
    found, truth = train(x, **options), true_gradients(x, **options)
    assert all(found[f"d{name}"].dtype == x[name].dtype for name in INPUTS if name in x)
    assert_accurate(found, truth, x["q"].dtype, x["v"].numel() ** 0.5)


@pytest.mark.parametrize("dims", TRAINED, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
def test_gradients_of_all_dims(states: bool, dims: tuple[int, int], dtype: torch.dtype, walkers: int) -> None:
    check_gradients(draw(dims=dims, dtype=dtype, states=states))


@of_dims
@pytest.mark.parametrize("seq", [1, 15, 16, 17, 63, 64, 65, 128, 129, 192, 320, 500])
def test_gradients_of_any_length(seq: int, dims: tuple[int, int], dtype: torch.dtype, walkers: int) -> None:
    check_gradients(draw(1, seq, max(2, 32 // seq), dims=dims, dtype=dtype))


@of_dims
@of_gate_dtypes
@pytest.mark.parametrize("gates", GATES)
def test_gradients_of_gates(
    gates: str, of_gates: torch.dtype, dims: tuple[int, int], dtype: torch.dtype, walkers: int
) -> None:
    if of_gates == torch.float16 and gates == "-1e5":
        gates = "-inf"
    check_gradients(draw(dims=dims, dtype=dtype, gates=gates, of_gates=of_gates))


@of_gate_dtypes
@pytest.mark.parametrize("raw", RAW_GATES)
@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (96, 80)], ids="{0[0]}_{0[1]}".format)
def test_gradients_of_raw_inputs(
    dims: tuple[int, int], flags: dict[str, bool], raw: str, of_gates: torch.dtype, dtype: torch.dtype
) -> None:
    x, options = draw_raw(of_gates, RAW_GATES[raw] | flags, dims=dims, dtype=dtype, value_heads=4)
    if not flags.get("qk_l2norm"):
        x |= {name: normalize(x[name].float(), dim=-1).to(dtype) for name in ("q", "k")}
    check_gradients(x, **options)


@of_dims
@pytest.mark.parametrize("heads", [(2, 6), (1, 4)], ids="{0[0]}_{0[1]}".format)
def test_gradients_of_shared_heads(heads: tuple[int, int], dims: tuple[int, int], walkers: int) -> None:
    check_gradients(draw(heads=heads[0], value_heads=heads[1], dims=dims))


@of_dims
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize("gates", ["usual", "mixed"])
def test_gradients_of_packed(
    gates: str, v_first: bool, offsets: torch.dtype, dims: tuple[int, int], walkers: int
) -> None:
    sizes = {"batch": 1, "seq": sum(LENGTHS), "sequences": len(LENGTHS), "dims": dims, "v_first": v_first}
    x = pack(draw(gates=gates, of_gates=torch.bfloat16, **sizes), offsets)
    check_gradients(x, state_v_first=v_first)


def test_gradients_of_packed_raw_inputs() -> None:
    """Sums over all sequences for A_log and dt_bias."""
    sizes = {"batch": 1, "seq": sum(LENGTHS), "sequences": len(LENGTHS)}
    x, options = draw_raw(torch.bfloat16, RAW_GATES["softplus and bias"] | FLAGS[0], **sizes)
    check_gradients(pack(x), **options)


def test_gradients_of_packed_sequences_are_bitwise_those_alone() -> None:
    """Also beside a sequence of NaN."""
    lengths = [70, 1, 64, 201]
    x = draw(1, sum(lengths), 2, sequences=len(lengths))
    of_tokens = ("q", "k", "v", "g", "beta")
    for name in of_tokens:
        x[name][:, :70] = torch.nan
    normal = Normal(9)
    do = normal(*x["v"].shape).to(x["v"].dtype)
    dht = normal(*x["initial_state"].shape)
    found = train(pack(x, lengths=lengths), [do, dht])
    for n in range(1, len(lengths)):
        alone = {name: x[name].split(lengths, 1)[n] for name in of_tokens}
        alone["initial_state"] = x["initial_state"][n : n + 1]
        expected = train(alone, [do.split(lengths, 1)[n], dht[n : n + 1]])
        of_sequence = {
            name: t[n : n + 1] if name == "dinitial_state" else t.split(lengths, 1)[n]
            for name, t in found.items()
        }
        assert_equal(of_sequence, expected)


def test_gradients_with_v_first_are_the_transpose() -> None:
    x = draw(states=True)
    outputs = run(x)
    do, dht = draw_cotangents(outputs)
    expected = train(x, [do, dht])
    v_first = x | {"initial_state": x["initial_state"].mT.contiguous()}
    found = train(v_first, [do, dht.mT.contiguous()], state_v_first=True)
    assert_equal(found | {"dinitial_state": found["dinitial_state"].mT}, expected)


@pytest.mark.parametrize("heads", [2, 6], ids=["own heads", "shared heads"])
def test_gradients_without_what_the_forward_kept(heads: int) -> None:
    x = draw(value_heads=heads)
    assert_equal(train(x, keep=False), train(x))


def test_gradients_without_one_of_the_final_state_and_of_the_gates() -> None:
    x, options = draw_raw(torch.float32, RAW_GATES["softplus and bias"] | FLAGS[0])
    call = call_of(x, **options)
    o, last, kept = forward_of(call, output_final_state=True, keep=True)
    do, _ = draw_cotangents({"o": o, "final_state": last})
    expected = train(x, [do, torch.zeros_like(last)], **options)
    found = dict(zip(INPUTS, backward(call, kept, do, None, needs_gates=False), strict=True))
    assert found["g"] is found["A_log"] is found["dt_bias"] is None
    assert_equal(
        {f"d{name}": t for name, t in found.items() if t is not None},
        {name: t for name, t in expected.items() if name not in ("dg", "dA_log", "ddt_bias")},
    )


@pytest.mark.parametrize("layout", [transposed, shifted, odd_rows, "fused"])
def test_gradients_of_views(layout: Any) -> None:
    x = draw(dims=(128, 128), of_gates=torch.bfloat16)
    do, dht = draw_cotangents(run(x))
    expected = train(x, [do, dht])
    operands = {name: x[name] for name in ("q", "k", "v", "g")}
    views = fuse(operands) if layout == "fused" else relayout(operands, layout) | {"g": layout(x["g"])}
    given = [do if layout == "fused" else layout(do), dht.mT.contiguous().mT]
    assert_equal(train(x | views | {"beta": x["beta"].mT.contiguous().mT}, given), expected)


def test_gradients_where_v_is_too_large() -> None:
    with pytest.raises(UnsupportedError, match="V = 256"):
        train(draw(dims=(128, 256)))


@of_dims
@pytest.mark.parametrize("gates", ["usual", "mixed"])
def test_gradients_are_whole_and_repeat(gates: str, dims: tuple[int, int], walkers: int) -> None:
    x, options = draw_raw(torch.float32, {"lower_bound": -5.0} | FLAGS[0], batch=3, seq=500, dims=dims)
    x["g"] = draw_gates(gates, Normal(3), *x["g"].shape)
    assert_whole_and_repeated(lambda: train(x, **options))


def test_gradients_of_packed_sequences_are_whole_and_repeat() -> None:
    sizes = {"batch": 1, "seq": sum(LENGTHS), "sequences": len(LENGTHS), "value_heads": 4}
    x, options = draw_raw(torch.bfloat16, RAW_GATES["softplus and bias"] | FLAGS[0], **sizes)
    assert_whole_and_repeated(lambda: train(pack(x), **options))


def test_gradients_in_a_graph() -> None:
    x, options = draw_raw(torch.bfloat16, RAW_GATES["softplus and bias"] | FLAGS[0])
    given = draw_cotangents(run(x, **options))
    other = {name: t.flip(0) for name, t in x.items()}
    expected = [train(y, given, **options) for y in (other, x)]
    assert_graph_replays(lambda x: train(x, given, **options), x, other, expected, 6)


@pytest.mark.sanitize
@of_dims
@pytest.mark.parametrize("gates", ["usual", "mixed"])
def test_gradients_of_small_calls(gates: str, dims: tuple[int, int], walkers: int) -> None:
    """Every place of every ring is used twice at least."""
    check_gradients(draw(1, 450, 2, dims=dims, gates=gates))


@pytest.mark.sanitize
def test_gradients_of_small_packed_calls_of_raw_inputs(walkers: int) -> None:
    lengths = [70, 0, 1, 64, 100]
    sizes = {"batch": 1, "seq": sum(lengths), "sequences": len(lengths), "dims": (96, 80), "value_heads": 4}
    x, options = draw_raw(torch.bfloat16, RAW_GATES["softplus and bias"] | FLAGS[0], **sizes)
    check_gradients(pack(x, lengths=lengths), **options)
