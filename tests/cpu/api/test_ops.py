"""The registered ops: schema, fakes, autograd, torch.compile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from tfla_tk import Support, mlstm_chunkwise, mlstm_siging_chunkwise, reference, which
from tfla_tk.ops import mlstm as ops

from .conftest import STATES, leaves, make_inputs

FWD = torch.ops.tfla_tk.mlstm_fwd.default
BWD = torch.ops.tfla_tk.mlstm_bwd.default


INPUTS = ("q", "k", "v", "i", "f", *STATES, "cu_seqlens")


def arguments(
    x: dict[str, Tensor], gate: str = "exp", normalize: bool = True, last: bool = True, rows: bool = False
) -> tuple[Any, ...]:
    return (*(x.get(n) for n in INPUTS), gate == "sig", normalize, 1e-6, last, rows)


def packed(states: tuple[str, ...] = (), **changed: Any) -> dict[str, Tensor]:
    """Three sequences in a batch of one, the second of them empty."""
    x = make_inputs(1, seq=20, sequences=3, states=states, **changed)
    return x | {"cu_seqlens": torch.tensor([0, 7, 7, 20], dtype=torch.int32)}


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("gate", "states"), [("exp", ()), ("exp", STATES), ("sig", ()), ("sig", STATES[:2])])
def test_opcheck_forward(gate: str, states: tuple[str, ...], rows: bool, last: bool, varlen: bool) -> None:
    x = packed(states) if varlen else make_inputs(seq=20, states=states)
    opcheck(FWD, arguments(leaves(x), gate, last=last, rows=rows))


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(("gate", "states"), [("exp", STATES), ("sig", ())])
def test_opcheck_backward(gate: str, states: tuple[str, ...], varlen: bool) -> None:
    x = packed(states) if varlen else make_inputs(seq=20, states=states)
    h, c, n, _, *rows = FWD(*arguments(x, gate, rows=True))
    dh, dc, dn = (torch.randn_like(t) for t in (h, c, n))
    tensors = (*(x.get(name) for name in INPUTS), h, *rows, c, n, dh, dc, dn)
    opcheck(BWD, (*tensors, gate == "sig", True, 1e-6))


def test_opcheck_keeps_the_memory_order_of_v() -> None:
    x = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in make_inputs(seq=20).items()}
    opcheck(FWD, arguments(x))
    assert FWD(*arguments(x))[0].stride() == x["v"].stride()


def test_states_are_empty_unless_asked_for() -> None:
    x = make_inputs()
    h, c, n, m, *_ = FWD(*arguments(x, last=False))
    assert [t.numel() for t in (c, n, m)] == [0, 0, 0]
    assert {t.dtype for t in (c, n, m)} == {torch.float32}
    assert torch.equal(h, FWD(*arguments(x))[0])
    _, c, n, m, *_ = FWD(*arguments(x, "sig"))
    assert (c.shape, n.shape, m.shape) == ((2, 3, 16, 32), (2, 3, 16), (0,))
    _, _, n, *_ = FWD(*arguments(x, "sig", normalize=False))
    assert n.shape == (2, 3, 16) and bool((n == 0).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(("gate", "normalize"), [("exp", True), ("sig", True), ("sig", False)])
def test_rows(gate: str, normalize: bool, varlen: bool, dtype: torch.dtype) -> None:
    """s q_t.n_t and m_t of the recurrence, token by token."""
    x = packed(dtype=dtype) if varlen else make_inputs(1, seq=20, dtype=dtype)
    *_, row_n, row_m, chunk_m = FWD(*arguments(x, gate, normalize, rows=True))
    assert {row_n.dtype, row_m.dtype, chunk_m.dtype} == {ops.state_dtype(x["q"])}
    assert row_n.shape == ((1, 3, 20) if normalize else (0,))
    assert row_m.shape == ((1, 3, 20) if gate == "exp" else (0,))
    assert chunk_m.shape == ((1, 3, 4 if varlen else 1, 2) if gate == "exp" else (0,))
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    wide = {name: t.double() for name, t in x.items() if name != "cu_seqlens"}
    function = reference.mlstm_recurrent if gate == "exp" else reference.mlstm_siging_recurrent
    for t in range(20):
        first = 7 if varlen and t >= 7 else 0
        _, (_, n, *m) = function(
            **{name: tensor[:, :, first : t + 1] for name, tensor in wide.items()}, return_last_states=True
        )
        if normalize:
            d = (wide["q"][:, :, t] * n).sum(-1) * 16**-0.5
            torch.testing.assert_close(row_n[:, :, t].double(), d, **tolerance)
        if m:
            torch.testing.assert_close(row_m[:, :, t].double(), m[0][..., 0], **tolerance)


@pytest.mark.parametrize("lengths", [None, [0, 70, 64, 1, 0, 200, 63]], ids=["batch", "packed"])
@pytest.mark.parametrize("initial", [False, True], ids=["zeros", "initial"])
def test_stabiliser_at_the_start_of_every_chunk(lengths: list[int] | None, initial: bool) -> None:
    """In log2 units, a slot per chunk: that of the last token before it, or the initial one."""
    states = STATES if initial else ()
    if lengths is None:
        x, bounds = make_inputs(seq=150, dtype=torch.float64, states=states), [(0, 150)]
    else:
        ends = torch.tensor([0, *lengths]).cumsum(0)
        x = make_inputs(1, seq=sum(lengths), dtype=torch.float64, states=states, sequences=len(lengths))
        x["cu_seqlens"], bounds = ends, list(itertools.pairwise(ends.tolist()))
    *_, row_m, chunk_m = FWD(*arguments(x, rows=True))
    chunk_m = chunk_m.sum(-1)
    assert chunk_m.shape[-1] == ops.chunk_slots(x["q"].shape[2], x.get("cu_seqlens"))
    used = []
    for sequence, (start, end) in enumerate(bounds):
        for chunk in range(-(-(end - start) // 64)):
            used.append(start // 64 + sequence + chunk)
            if chunk > 0:
                expected = row_m[:, :, start + 64 * chunk - 1]
            elif initial:
                m = x["m_initial"][..., 0]
                expected = m if lengths is None else m[sequence : sequence + 1]
            else:
                expected = torch.zeros_like(row_m[:, :, 0])
            torch.testing.assert_close(chunk_m[:, :, used[-1]], expected / math.log(2))
    assert len(set(used)) == len(used) and max(used) < chunk_m.shape[-1]


def test_chunk_stabilisers_in_two_parts() -> None:
    """Good for what fp64 tells of them in log2 units, from rows in fp32."""
    x = make_inputs(seq=150, dtype=torch.bfloat16)
    x["i"] = 1e4 * x["i"]
    *_, row_m, chunk_m = FWD(*arguments(x, rows=True))
    exact = row_m[:, :, 63:128:64].double() / math.log(2)
    assert chunk_m.dtype == torch.float32 and bool((chunk_m[:, :, 1:, 1] != 0).any())
    torch.testing.assert_close(chunk_m[:, :, 1:].double().sum(-1), exact, rtol=2**-46, atol=0.0)


def test_chunk_stabilisers_without_weight() -> None:
    """The sum of the parts is -inf too."""
    x = make_inputs(seq=70, dtype=torch.bfloat16, states=STATES)
    x["m_initial"].fill_(-math.inf)
    *_, chunk_m = FWD(*arguments(x, rows=True))
    assert bool((chunk_m[:, :, 0].sum(-1) == -math.inf).all()) and bool(chunk_m[:, :, 1].isfinite().all())


def test_rows_only_on_request_and_without_gradient() -> None:
    x = leaves(make_inputs(states=STATES))
    h, c, n, m, *rows = FWD(*arguments(x))
    assert [tuple(t.shape) for t in rows] == [(0,)] * 3
    h_again, _, _, _, *rows = FWD(*arguments(x, rows=True))
    assert torch.equal(h, h_again)
    assert [tuple(t.shape) for t in rows] == [(2, 3, 40), (2, 3, 40), (2, 3, 1, 2)]
    assert h_again.requires_grad and c.requires_grad and n.requires_grad
    assert not any(t.requires_grad for t in (m, *rows))


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("gate", ["exp", "sig"])
def test_what_the_backward_is_given(gate: str, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward's rows without asking for them, and the last state where its gradient may come."""
    seen: list[tuple[Any, ...]] = []

    def record(*args: Any) -> ops.Grads:
        seen.append(args)
        return ops._bwd_cpu(*args)

    monkeypatch.setattr(ops, "_bwd", record)
    states = STATES if gate == "exp" else STATES[:2]
    x = make_inputs(seq=70, dtype=torch.float64, states=states)
    truth = FWD(*arguments(x, gate, rows=True))
    h, c, *_ = FWD(*arguments(leaves(x), gate, last=last))
    (h.sum() + c.sum()).backward()
    found = dict(zip(("h", "row_n", "row_m", "chunk_m", "c_last", "n_last"), seen[0][9:15], strict=True))
    expected = dict(zip(("h", "row_n", "row_m", "chunk_m"), (truth[0], *truth[4:]), strict=True))
    assert all(torch.equal(found[name], t) for name, t in expected.items())
    assert torch.equal(found["c_last"], truth[1]) if last else found["c_last"] is found["n_last"] is None
    assert (seen[0][16] is None) != last


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gates_reach_the_op_as_they_are(dtype: torch.dtype, fake_tk: Any) -> None:
    """The kernels read every dtype but float64, which becomes fp32."""
    fake_tk.verdict = Support(True)
    seen = []

    def record(*args: Any) -> ops.Output:
        seen.append({args[3].dtype, args[4].dtype})
        return ops._fwd_cpu(*args)

    fake_tk.forward.mlstm_fwd = record
    x = make_inputs(dtype=torch.bfloat16)
    x |= {n: x[n].to(dtype) for n in "if"}
    mlstm_chunkwise(**x, backend="tk")
    assert seen == [{torch.float32 if dtype == torch.float64 else dtype}]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("gate", ["exp", "sig"])
def test_fake_cuda_tensors(gate: str, last: bool, fake_tk: Any) -> None:
    """Shapes, dtypes, strides and device of a GPU call, on a machine without a GPU."""
    fake_tk.verdict = Support(True)
    with FakeTensorMode():
        q, k = (torch.empty(2, 100, 4, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in "qk")
        v = torch.empty(2, 100, 4, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        i, f = (torch.empty(2, 4, 100, device="cuda") for _ in "if")
        options = (None, None, None, None, gate == "sig", True, 1e-6)
        h, c, n, m, row_n, row_m, chunk_m = FWD(q, k, v, i, f, *options, last, True)
        assert (h.shape, h.dtype, h.stride(), h.device) == (v.shape, torch.bfloat16, v.stride(), v.device)
        shapes = [(2, 4, 64, 128), (2, 4, 64), (2, 4, 1) if gate == "exp" else (0,)] if last else [(0,)] * 3
        assert [tuple(t.shape) for t in (c, n, m)] == shapes
        assert row_n.shape == i.shape and row_m.shape == (i.shape if gate == "exp" else (0,))
        assert chunk_m.shape == ((2, 4, 2, 2) if gate == "exp" else (0,))
        assert all(
            t.dtype == torch.float32 and t.device == v.device for t in (c, n, m, row_n, row_m, chunk_m)
        )
        function = mlstm_chunkwise if gate == "exp" else mlstm_siging_chunkwise
        assert which(function, q, k, v, i, f).backend == "tk"
        out = function(q, k, v, i.bfloat16(), f, return_last_states=True)
        assert out[0].stride() == v.stride() and len(out[1]) == (3 if gate == "exp" else 2)
        rows = (h, row_n, row_m, chunk_m, None, None)
        grads = BWD(q, k, v, i, f, *options[:4], *rows, h, None, None, *options[4:])
        assert [tuple(g.shape) for g in grads] == [tuple(t.shape) for t in (q, k, v, i, f)] + [(0,), (0,)]


def test_fake_cuda_tensors_of_packed_sequences(fake_tk: Any) -> None:
    """No value of cu_seqlens is needed."""
    fake_tk.verdict = Support(True)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 4, 100, dim, dtype=torch.bfloat16, device="cuda") for dim in (64, 64, 128))
        i, f = (torch.empty(1, 4, 100, device="cuda") for _ in "if")
        cu_seqlens = torch.empty(6, dtype=torch.int32, device="cuda")
        h, (c, n, m) = mlstm_chunkwise(q, k, v, i, f, cu_seqlens=cu_seqlens, return_last_states=True)
        assert h.shape == v.shape and h.device == v.device
        assert (c.shape, n.shape, m.shape) == ((5, 4, 64, 128), (5, 4, 64), (5, 4, 1))


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(("gate", "normalize"), [("exp", True), ("sig", True), ("sig", False)])
def test_gradcheck(gate: str, normalize: bool, varlen: bool) -> None:
    """The autograd formula in fp64, through h and the last state, which is e^m (C, n) whatever m is."""
    states = STATES if gate == "exp" else STATES[:2] * normalize
    x = make_inputs(1, 1, 4, 2, 3, dtype=torch.float64, states=states, sequences=3 if varlen else None)
    fixed = {"m_initial": x.pop("m_initial")} if gate == "exp" else {}
    if varlen:
        fixed["cu_seqlens"] = torch.tensor([0, 1, 1, 4])

    def op(*tensors: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(x, tensors, strict=True)) | fixed
        h, c, n, m_last, *_ = FWD(*arguments(values, gate, normalize))
        scale = m_last.exp() if gate == "exp" else torch.ones(())
        return (h, c * scale[..., None], n * scale) if normalize else (h, c)

    assert torch.autograd.gradcheck(op, [t.requires_grad_() for t in x.values()])


def test_backward_without_a_gradient_of_h() -> None:
    x = {n: t.requires_grad_() for n, t in make_inputs(dtype=torch.float64).items()}
    FWD(*arguments(x))[1].sum().backward()
    expected = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    reference.mlstm_recurrent(**expected, return_last_states=True)[1][0].sum().backward()
    for name in ("k", "v", "i", "f"):
        torch.testing.assert_close(x[name].grad, expected[name].grad)


# torch.compile


def compiled_agrees(
    function: Callable[..., Any], x: dict[str, Tensor], backend: str, dynamic: bool = False
) -> None:
    """Values and gradients of the compiled function, in one graph."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    results = []
    # a graph on disk may call an op of another version of this package
    with torch._inductor.config.patch(force_disable_caches=True):
        for run in (function, compiled):
            inputs = leaves(x)
            h = run(**inputs)
            (h * h).sum().backward()
            results.append([h.detach(), *(t.grad for t in inputs.values() if t.requires_grad)])
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["auto", "tk"])
@pytest.mark.parametrize("gate", ["exp", "sig"])
def test_compile_public_function(gate: str, backend: str, fake_tk: Any) -> None:
    fake_tk.verdict = Support(backend == "tk")
    function = mlstm_chunkwise if gate == "exp" else mlstm_siging_chunkwise
    compiled_agrees(lambda **x: function(**x, backend=backend), make_inputs(), "aot_eager")


def test_compile_with_states_autocast_and_a_model_around(fake_tk: Any) -> None:
    fake_tk.verdict = Support(True)

    def model(**x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h, (c, n, m) = mlstm_chunkwise(**x, return_last_states=True)
            h2, (_, _, m2) = mlstm_chunkwise(
                **x, c_initial=c, n_initial=n, m_initial=m, return_last_states=True, backend="reference"
            )
        return torch.nn.functional.silu((h + h2).float()) + m2[..., None]

    compiled_agrees(model, make_inputs(), "aot_eager")


def test_compile_dynamic_shapes(fake_tk: Any) -> None:
    """One graph for every length: the op is not specialised."""
    fake_tk.verdict = Support(True)
    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(
        lambda **x: mlstm_chunkwise(**x, backend="tk"), fullgraph=True, backend=graphs, dynamic=True
    )
    for seq in (40, 57, 100):
        x = make_inputs(seq=seq)
        torch.testing.assert_close(compiled(**x), mlstm_chunkwise(**x, backend="reference"))
    assert graphs.frame_count == 1
    # packed: any length and any number of sequences
    for offsets in ([0, 7, 7, 40], [0, 1, 1, 50, 57], [0, 20, 60, 100]):
        x = make_inputs(1, seq=offsets[-1]) | {"cu_seqlens": torch.tensor(offsets)}
        torch.testing.assert_close(compiled(**x), mlstm_chunkwise(**x, backend="reference"))
    assert graphs.frame_count == 2


@pytest.mark.slow
def test_compile_with_inductor(fake_tk: Any) -> None:
    fake_tk.verdict = Support(True)
    compiled_agrees(lambda **x: 2 * mlstm_chunkwise(**x, backend="tk"), make_inputs(), "inductor")
