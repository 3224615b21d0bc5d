"""What the forward's host side hands to a kernel: what is copied, strides, pointers; no GPU is touched."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward
from tfla_tk.backends.tk.scalar_gate import walks as tk_walks
from tfla_tk.build import sources
from tfla_tk.ops import mlstm as ops

from .addresses import tensor_at
from .forward_launches import OF_A_LAUNCH, OF_ALL, Launches
from .stand_in import launch_instead

B, NH, S, K, V = 2, 3, 40, 64, 128


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    recorder = Launches()
    launch_instead(monkeypatch, tk_forward, recorder)
    tk_forward._forwards.clear()
    yield recorder
    tk_forward._forwards.clear()


def operands(dim: int) -> dict[str, Callable[[], Tensor]]:
    """A [B, NH, S, dim] tensor in every layout that a caller may pass, by name."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    return {
        "contiguous": lambda: empty(B, NH, S, dim),
        "transposed": lambda: empty(B, S, NH, dim).transpose(1, 2),
        "fused": lambda: empty(B, S, NH, 3 * dim)[..., dim : 2 * dim].transpose(1, 2),
        "head_last": lambda: empty(B, NH, dim, S).mT,
        "expanded": lambda: empty(B, 1, S, dim).expand(B, NH, S, dim),
        "shifted": lambda: empty(B, NH, S, dim + 8)[..., 1 : dim + 1],
        "shifted_transposed": lambda: empty(B, S, NH, dim + 8)[..., 1 : dim + 1].transpose(1, 2),
        "odd_rows": lambda: empty(B, NH, S, dim + 4)[..., :dim],
    }


IN_PLACE = ("contiguous", "transposed", "fused")
COPIED = ("head_last", "expanded", "shifted", "shifted_transposed", "odd_rows")


def run(
    q: Tensor, k: Tensor, v: Tensor, states: tuple[Tensor | None, ...] = (None,) * 3, **changed: Any
) -> tuple[Any, ...]:
    """tk_forward.mlstm_fwd with fp32 gates and the options of a plain call, but for those in ``changed``."""
    gates = [changed.pop(name, torch.empty(q.shape[:3])) for name in ("i", "f")]
    options: dict[str, Any] = {"sigmoid_gate": False, "normalize": True, "eps": 1e-6}
    options |= {"cu_seqlens": None, "return_last_states": False, "return_rows": False}
    return tk_forward.mlstm_fwd(q, k, v, *gates, *states, **(options | changed))


@pytest.mark.parametrize("layout", IN_PLACE)
def test_aligned_rows_are_read_in_place(layout: str, launches: Launches) -> None:
    q, k, v = operands(K)[layout](), operands(K)[layout](), operands(V)[layout]()
    h, *_ = run(q, k, v)
    (launch,) = launches
    for tensor, operand in ((q, launch.q), (k, launch.k), (v, launch.v), (h, launch.h)):
        assert operand == (tensor.data_ptr(), *tensor.stride()[:3])


@pytest.mark.parametrize("layout", COPIED)
def test_anything_else_is_copied(layout: str, launches: Launches) -> None:
    q, k, v = operands(K)[layout](), operands(K)[layout](), operands(V)[layout]()
    run(q, k, v)
    (launch,) = launches
    for tensor, operand in ((q, launch.q), (k, launch.k), (v, launch.v)):
        pointer, *strides = operand
        dim = tensor.shape[-1]
        assert pointer != tensor.data_ptr() and pointer % 16 == 0
        assert strides == [NH * S * dim, S * dim, dim]


@pytest.mark.parametrize(("layout", "value"), [("contiguous", 2.0), ("head_last", 3.0)])
def test_h_is_what_the_kernel_writes(layout: str, value: float, launches: Launches) -> None:
    """In place or, where the kernel cannot write h as it lies, copied."""

    def write(launch: SimpleNamespace) -> None:
        pointer, *strides = launch.h
        tensor_at(pointer, torch.bfloat16, (B, NH, S, V), *strides, 1).fill_(value)

    launches.write = write
    q = operands(K)["contiguous"]()
    h, *_ = run(q, q, operands(V)[layout]())
    assert (h == value).all()


@pytest.mark.parametrize("layout", [*IN_PLACE, *COPIED])
def test_h_has_the_strides_that_the_fake_op_says(layout: str, launches: Launches) -> None:
    v = operands(V)[layout]()
    h, *_ = run(operands(K)["contiguous"](), operands(K)["contiguous"](), v)
    with FakeTensorMode() as mode:
        q, i = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((B, NH, S, K), (B, NH, S)))
        fake = ops._fwd_fake(
            q, q, mode.from_tensor(v), i, i, None, None, None, None, False, True, 1e-6, False, False
        )
    assert h.shape == v.shape
    assert h.stride() == fake[0].stride()


@pytest.mark.parametrize("sizes", [(1, NH, S), (B, 1, S), (B, NH, 1), (1, 1, 1)])
def test_strides_of_single_entries_suit_the_descriptor(
    sizes: tuple[int, int, int], launches: Launches
) -> None:
    """A dimension of size 1 may have any stride in PyTorch; TMA wants multiples of 16 bytes."""

    def view(dim: int) -> Tensor:
        dense = (NH * S * dim, S * dim, dim)
        strides = (3 if size == 1 else stride for size, stride in zip(sizes, dense, strict=True))
        return torch.empty(B * NH * S * dim, dtype=torch.bfloat16).as_strided((*sizes, dim), (*strides, 1))

    q, v = view(K), view(V)
    run(q, q, v)
    (launch,) = launches
    assert launch.q[0] == q.data_ptr()
    assert all(stride > 0 and stride % 8 == 0 for x in (launch.q, launch.v, launch.h) for stride in x[1:])
    assert launch.sizes == (*sizes, K, V)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gates_keep_their_dtype_and_strides(dtype: torch.dtype, launches: Launches) -> None:
    q, v = operands(K)["contiguous"](), operands(V)["contiguous"]()
    i = torch.empty(B, S, NH, dtype=dtype).transpose(1, 2)
    f = torch.empty(B, 1, 2 * S, dtype=dtype)[..., ::2].expand(B, NH, S)
    run(q, q, v, i=i, f=f)
    (launch,) = launches
    code = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[dtype]
    assert launch.i == (i.data_ptr(), S * NH, 1, NH, code)
    assert launch.f == (f.data_ptr(), 2 * S, 0, 2, code)


def test_states(launches: Launches) -> None:
    q, v = operands(K)["contiguous"](), operands(V)["contiguous"]()
    shapes = ((B, NH, K, V), (B, NH, K), (B, NH, 1))
    for sigmoid_gate, normalize in ((False, True), (True, True), (True, False)):
        _, c, n, m, *rows = run(
            q, q, v, sigmoid_gate=sigmoid_gate, normalize=normalize, return_last_states=True
        )
        assert (m is None) == sigmoid_gate
        last = [t for t in (c, n, m) if t is not None]
        assert [tuple(t.shape) for t in last] == list(shapes[: len(last)])
        assert {t.dtype for t in last} == {torch.float32}
        wanted = (c, n if normalize else None, m)
        assert launches[-1].last == tuple(0 if t is None else t.data_ptr() for t in wanted)
        assert launches[-1].initial == (0, 0, 0)
        assert normalize or bool((n == 0).all())
        assert rows == [None] * 4
    assert run(q, q, v)[1:] == (None,) * 7
    assert launches[-1].last == (0, 0, 0)


def test_rows_for_the_backward(launches: Launches) -> None:
    q, v = operands(K)["contiguous"](), operands(V)["contiguous"]()
    for sigmoid_gate, normalize in ((False, True), (True, True), (True, False)):
        *_, row_n, row_m, chunk_m, _ = run(
            q, q, v, sigmoid_gate=sigmoid_gate, normalize=normalize, return_rows=True
        )
        assert (row_n is None, row_m is None, chunk_m is None) == (not normalize, sigmoid_gate, sigmoid_gate)
        assert sigmoid_gate or (chunk_m.shape, chunk_m.dtype) == ((B, NH, 1, 2), torch.float32)
        assert {tuple(t.shape) for t in (row_n, row_m) if t is not None} <= {(B, NH, S)}
        assert launches[-1].rows == tuple(0 if t is None else t.data_ptr() for t in (row_n, row_m, chunk_m))


def test_a_long_sequence_is_cut_and_gets_a_workspace(launches: Launches) -> None:
    def launch(seq: int, **options: Any) -> SimpleNamespace:
        q, v = (torch.empty(1, 2, seq, dim, dtype=torch.bfloat16) for dim in (K, V))
        run(q, q, v, **options)
        return launches[-1]

    short = launch(S)
    assert short.cut == (False, 1, 1, 1)
    assert short.workspace == 0
    long = launch(10_000)
    wide, sequences, count, chunks = long.cut
    assert (wide, sequences, long.offsets) == (False, 1, 0)
    assert count > 1
    assert count == -(-10_000 // (64 * chunks))
    assert long.workspace > 0


@pytest.mark.parametrize("normalize", [True, False])
def test_a_forward_is_cut_as_its_backward_and_leaves_it_the_states(
    normalize: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq, new_empty = 10_000, Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kw: new_empty(*args, **kw).fill_(math.nan))
    q, v = (torch.empty(1, 2, seq, dim, dtype=torch.bfloat16) for dim in (K, V))
    *_, states = run(q, q, v, return_rows=True, normalize=normalize, keep_states=True)
    cut = tk_walks.cut_sequences((1, 2, seq, K, V), 1, 132, packed=False)
    (launch,) = launches
    assert launch.cut[-2:] == cut
    assert cut.segments > 1
    slots = 2 * (cut.segments - 1)
    assert launch.workspace == states.workspace.data_ptr()
    assert states.cut == cut
    assert states.offsets == launches.workspace_offsets(slots, K, V)
    assert bool(states.workspace.isnan().all())  # nothing is written but by the kernels


def test_short_sequences_leave_no_states(launches: Launches) -> None:
    q, v = operands(K)["contiguous"](), operands(V)["contiguous"]()
    *_, states = run(q, q, v, return_rows=True, keep_states=True)
    assert states is None


def test_a_forward_that_keeps_nothing_has_a_cut_of_its_own(launches: Launches) -> None:
    seq = 10_000
    q, v = (torch.empty(1, 2, seq, dim, dtype=torch.bfloat16) for dim in (K, V))
    *_, states = run(q, q, v, return_rows=True)
    (launch,) = launches
    _, slices = tk_forward._instance(K, V)
    assert launch.cut[-2:] == segments.cut(1, seq, 2 * slices, 132)
    assert launch.workspace > 0 and states is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences(dtype: torch.dtype, launches: Launches) -> None:
    lengths = 2 * torch.tensor([0, 10, 10, S], dtype=dtype)
    offsets = lengths.repeat_interleave(2)[::2]  # strided
    q, v = (torch.empty(1, NH, 2 * S, dim, dtype=torch.bfloat16) for dim in (K, V))
    _, c, n, m, *_ = run(q, q, v, cu_seqlens=offsets, return_last_states=True)
    assert [t.shape[0] for t in (c, n, m)] == [3, 3, 3]
    wide, sequences, count, _ = launches[-1].cut
    assert launches[-1].offsets not in (0, offsets.data_ptr())
    assert (wide, sequences, count) == (dtype == torch.int64, 3, 3)


def test_initial_states_are_aligned_for_vector_loads(launches: Launches) -> None:
    """A contiguous view may start anywhere; the kernel reads two floats at a time."""
    q, v = operands(K)["contiguous"](), operands(V)["contiguous"]()
    shapes = ((B, NH, K, V), (B, NH, K), (B, NH, 1))
    shifted = tuple(torch.empty(torch.Size(shape).numel() + 1)[1:].view(shape) for shape in shapes)
    aligned = tuple(torch.empty(shape) for shape in shapes)
    run(q, q, v, aligned)
    assert launches[-1].initial == tuple(t.data_ptr() for t in aligned)
    run(q, q, v, shifted)
    assert launches[-1].initial[0] % 8 == 0


OPTIONS = tk_forward.Options(False, True, 1e-6, False, False)


def tensors_of(
    layout: str = "contiguous", states: bool = False, seq: int = S, first: int = 0
) -> tk_forward.Tensors:
    """What a forward takes: q, k, v in a layout of `operands`, they and states `first` elements late."""

    def starting_late(x: Tensor) -> Tensor:
        memory = torch.empty(first + 4 * x.numel(), dtype=x.dtype)
        return memory.as_strided(x.shape, x.stride(), first + x.storage_offset())

    q, k, v = (starting_late(operands(dim)[layout]()[:, :, :seq]) for dim in (K, K, V))
    gates = torch.empty(B, NH, seq), torch.empty(B, NH, seq)
    c, n, m = (
        starting_late(torch.empty(shape)) if states else None
        for shape in ((B, NH, K, V), (B, NH, K), (B, NH, 1))
    )
    return q, k, v, *gates, c, n, m, None


@pytest.mark.parametrize("layout", IN_PLACE)
def test_what_is_prepared_serves_every_call_like_it(layout: str, launches: Launches) -> None:
    """And holds no tensor."""
    first = tensors_of(layout, states=True)
    forward = tk_forward.prepare(first, OPTIONS)
    references = [weakref.ref(x) for x in first if x is not None]
    del first
    gc.collect()
    assert not any(reference() for reference in references)
    for _ in range(3):
        x = tensors_of(layout, states=True)
        h, *_ = forward(*x)
        launch = launches[-1]
        for operand, tensor in ((launch.q, x[0]), (launch.k, x[1]), (launch.v, x[2]), (launch.h, h)):
            assert operand == (tensor.data_ptr(), *tensor.stride()[:3])
        assert (launch.i[0], launch.f[0]) == (x[3].data_ptr(), x[4].data_ptr())
        assert launch.initial == tuple(t.data_ptr() for t in x[5:8] if t is not None)
    assert launches.forwards == 1


@pytest.mark.parametrize("states", [False, True])
def test_addresses_are_looked_at_in_every_call(states: bool, launches: Launches) -> None:
    """One element later nothing is where TMA or vector loads can take it."""
    forward = tk_forward.prepare(tensors_of(states=states), OPTIONS)
    x = tensors_of(states=states, first=1)
    forward(*x)
    read = [launches[-1].q[0], launches[-1].k[0], launches[-1].v[0], *launches[-1].initial]
    assert not any(address % 16 for address in read)
    given = {t.data_ptr() for t in x if t is not None}
    assert not given & set(read)
    # a state alone
    if states:
        x = *tensors_of()[:5], *x[5:]
        forward(*x)
        assert [launches[-1].q[0], launches[-1].k[0]] == [x[0].data_ptr(), x[1].data_ptr()]
        assert not any(address % 16 for address in launches[-1].initial)


@pytest.mark.parametrize("layout", COPIED)
def test_what_has_to_be_copied_is_copied_in_every_call(layout: str, launches: Launches) -> None:
    forward = tk_forward.prepare(tensors_of(layout), OPTIONS)
    for _ in range(2):
        x = tensors_of(layout)
        h, *_ = forward(*x)
        assert launches[-1].q[0] not in (0, x[0].data_ptr())
        assert h.stride() == torch.empty_like(x[2]).stride()
    assert launches.forwards == 1


def test_calls_alike_share_a_forward(launches: Launches) -> None:
    """Everything that a launch has but addresses makes another one."""
    x = tensors_of()
    changes: list[tuple[tk_forward.Tensors, tk_forward.Options]] = [
        (x, OPTIONS),
        (tensors_of("transposed"), OPTIONS),
        (tensors_of("fused"), OPTIONS),
        (tensors_of(seq=S - 1), OPTIONS),
        ((*x[:3], x[3].bfloat16(), *x[4:]), OPTIONS),
        ((*x[:3], x[3], x[4].mT.contiguous().mT, *x[5:]), OPTIONS),
        (tensors_of(states=True), OPTIONS),
        ((*(t.half() for t in x[:3]), *x[3:]), OPTIONS),
        *((x, OPTIONS._replace(**{name: True})) for name in ("return_last_states", "return_rows")),
        (x, OPTIONS._replace(eps=1e-5)),
        (x, OPTIONS._replace(sigmoid_gate=True)),
        (x, OPTIONS._replace(sigmoid_gate=True, normalize=False)),
        (x, OPTIONS._replace(sequential=True)),
    ]
    for _ in range(2):
        for tensors, options in changes:
            tk_forward.run(tensors, options)
    assert launches.forwards == len(changes)
    assert len(launches) == 2 * len(changes)


def test_arguments_are_those_of_the_bindings() -> None:
    text = (sources.kernels_root() / "scalar_gate/bindings/forward.cpp").read_text()
    definition = text[text.index("py::class_<Forward>") :]
    definition = definition[: definition.index(");\n")]
    assert tuple(re.findall(r'py::arg\("(\w+)"\)', definition)) == (*OF_ALL, *OF_A_LAUNCH)


def test_instance_and_options(launches: Launches) -> None:
    q, v = torch.empty(B, NH, S, 80, dtype=torch.float16), torch.empty(B, NH, S, 272, dtype=torch.float16)
    run(q, q, v, eps=0.5, sigmoid_gate=True, normalize=False)
    (launch,) = launches
    assert launches.instance.name == "mlstm_fwd_k128_v256"
    assert launch.sizes == (B, NH, S, 80, 272)
    assert launch.scale == 80**-0.5
    assert (launch.eps, launch.half, launch.sigmoid_gate, launch.normalize) == (0.5, True, True, False)
    assert launch.stream == 7
