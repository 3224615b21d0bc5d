"""What the host side of GLA hands to its kernels, whose place the reference takes; no GPU is touched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import build, reference
from tfla_tk.backends.tk.channel_gate import backward, call, launch, support
from tfla_tk.calls.gla import GLACore
from tfla_tk.core.layout import ADDRESS_BITS, DTYPES
from tfla_tk.core.memo import Memo
from tfla_tk.core.support import SUPPORTED

from .addresses import tensor_at
from .stand_in import PreparedLaunches

B, T, H = 2, 150, 3
OF_CODE = {code: dtype for dtype, code in DTYPES.items()}
# of the modules' functions, as channel_gate/bindings name them
ARGUMENTS = {
    "forward": ("shape", "q", "k", "v", "o", "g", "g_dtype", "initial", "last", "scale", "walkers"),
    "mirror": ("shape", "q", "k", "do", "dv", "g", "g_dtype", "d_last", "d_initial", "scale", "walkers"),
}
ARGUMENTS["forward"] += ("other_dim_k", "adds")
ARGUMENTS["mirror"] += ("other_dim_k", "adds")
ARGUMENTS["left"] = ARGUMENTS["right"] = (
    *("shape", "q", "k", "v", "do", "g", "g_dtype", "result", "gates", "entering", "scale", "walkers"),
    "slice",
)
ANCHOR_BYTES = 48  # anything


class Kernel(PreparedLaunches):
    """Computes the reference of what lies at the addresses."""

    ARGUMENTS = ARGUMENTS

    def __init__(self) -> None:
        super().__init__()
        self.of_anchors: list[tuple[int, ...]] = []  # shapes that anchor_bytes was asked for
        self.of_sums: list[tuple[int, ...]] = []  # likewise sums_bytes

    def anchor_bytes(self, shape: tuple[int, ...]) -> int:
        self.of_anchors.append(shape)
        return ANCHOR_BYTES

    def sums_bytes(self, shape: tuple[int, ...]) -> int:
        self.of_sums.append(shape)
        batch, heads, seq, dim_k = shape[5:9]
        return 2 * 4 * batch * heads * seq * dim_k

    def compute(self, launch: SimpleNamespace, starts: list[int]) -> None:
        compute(launch, starts)


class Call:
    """What a launch finds at its addresses."""

    def __init__(self, x: SimpleNamespace, starts: list[int]) -> None:
        self.x, self.starts = x, starts
        self.offsets, self.wide, self.sequences, segments, chunks, *sizes, half, _ = x.shape
        self.batch, self.heads, self.seq, self.dim_k, self.dim_v = sizes
        self.dtype = torch.float16 if half else torch.bfloat16
        assert segments == self.sequences and 64 * chunks > self.seq
        self.slice: tuple[int, int, bool, bool] | None = getattr(x, "slice", None)
        self.is_first, self.is_last = self.slice[2:] if self.slice else (True, True)

    def address(self, prepared: int) -> int:
        start = self.starts[(prepared >> ADDRESS_BITS) - 1]
        assert start
        return start + (prepared & ((1 << ADDRESS_BITS) - 1))

    def tensor(self, operand: tuple[int, ...], dim: int, dtype: torch.dtype | None = None) -> Tensor:
        at, of_batch, of_head, of_row = operand
        # in a batch of one, which TMA wants aligned strides of all the same
        strides = (of_batch if self.batch > 1 else 0, of_row, of_head, 1)
        shape = (self.batch, self.seq, self.heads, dim)
        return tensor_at(self.address(at), dtype or self.dtype, shape, *strides)

    def keys(self, operand: tuple[int, ...]) -> Tensor:
        return self.tensor(operand, self.dim_k)

    def values(self, operand: tuple[int, ...]) -> Tensor:
        return self.tensor(operand, self.dim_v)

    def gates(self) -> Tensor:
        return self.tensor(self.x.g, self.dim_k, OF_CODE[self.x.g_dtype])

    def numbers(self, at: int, *shape: int) -> Tensor | None:
        """Of every sequence and head."""
        shape = (self.sequences, self.heads, *shape)
        return tensor_at(self.address(at), torch.float32, shape) if at else None

    def state(self, at: int) -> Tensor | None:
        """Of a launch's channels and columns, between those of others."""
        if not at:
            return None
        row = self.dim_v + (self.slice[0] if self.slice else 0)
        of_head = (self.dim_k + getattr(self.x, "other_dim_k", 0)) * row
        shape = (self.sequences, self.heads, self.dim_k, self.dim_v)
        strides = (self.heads * of_head, of_head, row, 1)
        return tensor_at(self.address(at), torch.float32, shape, *strides)

    def sum_up(self, *parts: Tensor) -> list[Tensor]:
        """The sums over V up to and with this slice's, which are left for the next one."""
        if self.slice is None:
            return [part.float() for part in parts]
        shape = (2, self.batch, self.seq, self.heads, self.dim_k)
        sums = tensor_at(self.address(self.slice[1]), torch.float32, shape)
        found = [
            part.float() if self.is_first else old + part for old, part in zip(sums, parts, strict=False)
        ]
        for old, new in zip(sums, found, strict=False):
            old.copy_(torch.nan if self.is_last else new)  # nothing else may be needed of them
        return found

    def options(self) -> dict[str, Any]:
        dtype, at = torch.int64 if self.wide else torch.int32, self.offsets
        cu_seqlens = tensor_at(self.address(at), dtype, (self.sequences + 1,)) if at else None
        return {"scale": self.x.scale, "cu_seqlens": cu_seqlens}


def write(to: Tensor | None, x: Tensor | None) -> None:
    if to is not None:
        assert x is not None
        to.copy_(x)


def compute(x: SimpleNamespace, starts: list[int]) -> None:
    """What a launch leaves. The walks over the states hand on what tells which inputs they were given."""
    of = Call(x, starts)
    options = of.options()
    if x.name == "forward":
        q, k, v = of.keys(x.q), of.keys(x.k), of.values(x.v)
        options |= {"initial_state": of.state(x.initial), "output_final_state": True}
        o, last = reference.gla_chunkwise(q, k, v, of.gates(), **options)
        written = of.values(x.o)
        written.copy_(written + o if x.adds else o)
        write(of.state(x.last), last)
        return
    q, k, do, g = of.keys(x.q), of.keys(x.k), of.values(x.do), of.gates()
    initial = torch.zeros(of.sequences, of.heads, of.dim_k, of.dim_v)
    if x.name == "mirror":  # of these gradients alone, neither depends on v or the first state
        d_last = of.state(x.d_last)
        found = reference.gla_backward(q, k, do, g, do, d_last, initial_state=initial, **options)
        dv = of.values(x.dv)
        dv.copy_(dv + found.dv if x.adds else found.dv)
        write(of.state(x.d_initial), found.dh0)
        return
    v = of.values(x.v)
    if x.slice is not None:  # sums are rounded once they are complete
        q, k, v, do, g = (t.float() for t in (q, k, v, do, g))
    inflow, d_last = None, of.state(x.entering) if x.name == "right" else None
    if x.gates is not None:
        inflow_at, dg_at, (d_last_at, flows_at, anchors_at) = x.gates
        inflow = of.tensor(inflow_at, of.dim_k, torch.float32)
        dg = of.tensor(dg_at, of.dim_k, OF_CODE[x.g_dtype])
        flows, d_last = of.numbers(flows_at, of.dim_k), of.state(d_last_at)
        anchors = tensor_at(of.address(anchors_at), torch.uint8, (ANCHOR_BYTES,))
    if x.name == "left":
        entering = of.state(x.entering)
        found = reference.gla_backward(q, k, v, g, do, d_last, initial_state=entering, **options)
        dq, dg = of.sum_up(found.dq, found.dg)
        if x.gates is not None:
            anchors.fill_(7)
            if flows is not None:
                flows.copy_(3.0 if of.is_first else flows + 3.0)
        if of.is_last:
            write(of.keys(x.result), dq)
            if x.gates is not None:
                inflow.copy_(dg)
        return
    found = reference.gla_backward(q, k, v, g, do, d_last, **options)
    (dk,) = of.sum_up(found.dk)
    if x.gates is not None:  # of the left walk's, in place or not
        assert anchors.eq(7).all()
        of_slices = 1 if of.slice is None else -(-(of.dim_v + of.slice[0]) // 256)
        assert flows is None or flows.eq(3.0 * of_slices).all()
    if of.is_last:
        write(of.keys(x.result), dk)
        if x.gates is not None:
            dg.copy_(inflow.clone())


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(build, "load", found.load)
    for module in (launch, backward):
        monkeypatch.setattr(module, "current_stream", lambda device: 7)
    monkeypatch.setattr(call, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "_forwards", Memo())
    monkeypatch.setattr(backward, "_backwards", Memo())
    return found


def draw(
    dims: tuple[int, int] = (64, 128),
    dtype: torch.dtype = torch.bfloat16,
    of_gates: torch.dtype = torch.float32,
    offsets: torch.dtype | None = None,
    state: bool = True,
    schedule: str = "auto",
    batch_invariant: bool = False,
) -> GLACore:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    batch, tokens, rows = (B, T, B) if offsets is None else (1, B * T, 4)
    q, k, g = (normal(batch, tokens, H, dims[0]) for _ in range(3))
    v = normal(batch, tokens, H, dims[1]).to(dtype)
    cu_seqlens = None if offsets is None else torch.tensor([0, 70, 70, 134, B * T], dtype=offsets)
    g = torch.nn.functional.logsigmoid(g).to(of_gates)
    initial = normal(rows, H, *dims) if state else None
    return GLACore(q.to(dtype), k.to(dtype), v, g, initial, cu_seqlens, 0.3, batch_invariant, schedule)


def check(core: GLACore, output_final_state: bool = True) -> None:
    expected = reference.gla_chunkwise(
        *core[:4],
        scale=core.scale,
        initial_state=core.initial_state,
        output_final_state=output_final_state,
        cu_seqlens=core.cu_seqlens,
    )
    o, last, kept = launch.forward(core, output_final_state=output_final_state, keep=True)
    if core.q.shape[3] <= 128:
        assert torch.equal(o, expected[0])
    else:  # a sum of rounded ones
        torch.testing.assert_close(o, expected[0], atol=0.2, rtol=2e-2)
    assert kept is None
    if output_final_state:
        torch.testing.assert_close(last, expected[1])
    else:
        assert last is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
def test_tensors_and_sizes(dtype: torch.dtype, of_gates: torch.dtype, state: bool, kernel: Kernel) -> None:
    core = draw(dtype=dtype, of_gates=of_gates, state=state)
    check(core)
    check(core, output_final_state=False)
    assert len(kernel.launches) == 2


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
def test_packed_sequences(offsets: torch.dtype, kernel: Kernel) -> None:
    check(draw(offsets=offsets))


def test_views(kernel: Kernel) -> None:
    """What TMA can address is read as it lies; the rest is copied."""
    core = draw()
    fused = torch.cat([core.q, core.k], dim=-1)
    heads_first = core.g.transpose(1, 2).contiguous().transpose(1, 2)
    views = core._replace(q=fused[..., :64], k=fused[..., 64:], g=heads_first)
    check(views)
    assert kernel.launches[-1].q[1:] == (T * H * 128, 128, H * 128)
    assert kernel.launches[-1].g[1:] == (H * T * 64, T * 64, 64)
    check(core._replace(g=torch.cat([core.g, core.g[..., :4]], -1)[..., :64]))
    check(core._replace(g=core.g[..., :1].expand(*core.g.shape)))
    assert core.initial_state is not None
    check(core._replace(initial_state=core.initial_state.mT.contiguous().mT))


@pytest.mark.parametrize("dims", [(256, 128), (192, 64), (144, 512)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("offsets", [None, torch.int64], ids=str)
def test_wide_keys_take_launches_of_128_channels(
    dims: tuple[int, int], offsets: torch.dtype | None, kernel: Kernel
) -> None:
    check(draw(dims=dims, offsets=offsets))
    assert [instance.name for instance in kernel.instances] == ["gla_forward_k128_overlapped"]
    assert [(x.shape[8], x.other_dim_k, x.adds) for x in kernel.launches] == [
        (128, dims[0] - 128, False),
        (dims[0] - 128, 128, True),
    ]


def test_a_call_like_another_is_prepared_once(kernel: Kernel) -> None:
    for _ in range(3):
        check(draw())
    assert len(kernel.instances) == 1
    check(draw(schedule="sequential"))
    check(draw(dims=(96, 64)))
    names = [instance.name for instance in kernel.instances]
    assert names == [
        "gla_forward_k64_overlapped",
        "gla_forward_k64_sequential",
        "gla_forward_k128_overlapped",
    ]
    assert [x.walkers for x in kernel.launches] == [2, 2, 2, 2, 1]


def check_backward(core: GLACore, needs_gates: bool = True, with_dht: bool = True) -> None:
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(core.v.shape, generator=generator).to(core.v.dtype)
    dht = None
    if with_dht:
        rows = core.q.shape[0] if core.cu_seqlens is None else core.cu_seqlens.shape[0] - 1
        shape = (rows, H, core.q.shape[3], core.v.shape[3])
        dht = torch.randn(*shape, generator=generator)
    expected = reference.gla_backward(
        *core[:4],
        do,
        dht,
        scale=core.scale,
        initial_state=core.initial_state,
        cu_seqlens=core.cu_seqlens,
    )
    dq, dk, dv, dg, dh0 = launch.backward(core, None, None, do, dht, needs_gates=needs_gates)
    for found, wanted, like in (
        (dq, expected.dq, core.q),
        (dk, expected.dk, core.k),
        (dv, expected.dv, core.v),
    ):
        assert found is not None
        is_sum = found is dv and core.q.shape[3] > 128  # of rounded ones
        rtol, atol = (2e-2, 0.2) if is_sum else (1e-2, 1e-4)
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)
        assert found.dtype == like.dtype
    if needs_gates:
        assert dg is not None
        torch.testing.assert_close(dg, expected.dg, rtol=1e-2, atol=1e-3)
        assert dg.dtype == core.g.dtype
    else:
        assert dg is None
    if core.initial_state is None:
        assert dh0 is None
    else:
        torch.testing.assert_close(dh0, expected.dh0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
def test_backward(dtype: torch.dtype, of_gates: torch.dtype, state: bool, kernel: Kernel) -> None:
    core = draw(dtype=dtype, of_gates=of_gates, state=state)
    for needs_gates in (True, False):
        for with_dht in (True, False):
            check_backward(core, needs_gates, with_dht)
    assert [x.name for x in kernel.launches] == ["mirror", "left", "right"] * 4


def test_anchors_are_asked_for_with_the_offsets(kernel: Kernel) -> None:
    """Packed sequences have more slots for them."""
    for offsets in (None, torch.int64):
        check_backward(draw(offsets=offsets))
    assert [shape[0] != 0 for shape in kernel.of_anchors] == [False, True]
    assert [shape[0] for shape in kernel.of_anchors] == [x.shape[0] for x in kernel.launches[::3]]


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
def test_backward_of_packed_sequences(offsets: torch.dtype, kernel: Kernel) -> None:
    check_backward(draw(offsets=offsets))


def test_backward_of_views(kernel: Kernel) -> None:
    core = draw(of_gates=torch.bfloat16)
    fused = torch.cat([core.q, core.k], dim=-1)
    heads_first = core.g.transpose(1, 2).contiguous().transpose(1, 2)
    check_backward(core._replace(q=fused[..., :64], k=fused[..., 64:], g=heads_first))
    check_backward(core._replace(g=torch.cat([core.g, core.g[..., :4]], -1)[..., :64]))
    assert core.initial_state is not None
    check_backward(core._replace(initial_state=core.initial_state.mT.contiguous().mT))


def test_a_backward_like_another_is_prepared_once(kernel: Kernel) -> None:
    for _ in range(3):
        check_backward(draw())
    assert len(kernel.instances) == 2
    check_backward(draw(schedule="sequential"))
    check_backward(draw(dims=(96, 208)))
    names = [instance.name for instance in kernel.instances]
    assert names == [
        *("gla_backward_k64_overlapped", "gla_states_v128"),
        *("gla_backward_k64_sequential", "gla_states_v128"),
        *("gla_backward_k128_overlapped", "gla_states_v256"),
    ]


@pytest.mark.parametrize(
    ("dims", "heads", "expected"),
    [((128, 128), 66, 1), ((128, 128), 67, 2), ((64, 128), 99, 1), ((128, 256), 99, 1)],
)
def test_walkers_of_states(dims: tuple[int, int], heads: int, expected: int, kernel: Kernel) -> None:
    """Two where they have to share multiprocessors, and have registers for it."""
    q, v = (torch.empty(1, 1, heads, dim, device="meta") for dim in dims)
    core = GLACore(q, q, v, q, None, None, 1.0, False, "auto")
    assert call.Shape.of(core).walkers_of_states == expected


def test_the_option_fixes_the_walkers_of_states(kernel: Kernel) -> None:
    for dims, expected in (((128, 128), 2), ((192, 64), 2), ((64, 128), 1), ((128, 256), 1)):
        for batch, heads in ((1, 1), (1, 66), (1, 67), (40, 16)):
            q, v = (torch.empty(batch, 1, heads, dim, device="meta") for dim in dims)
            core = GLACore(q, q, v, q, None, None, 1.0, True, "auto")
            assert call.Shape.of(core).walkers_of_states == expected


def test_calls_with_and_without_the_option_are_prepared_apart(kernel: Kernel) -> None:
    for batch_invariant in (False, True, False, True):
        check_backward(draw(dims=(128, 64), batch_invariant=batch_invariant))
    assert [x.walkers for x in kernel.launches if x.name != "mirror"] == [1, 1, 2, 2] * 2
    assert len(kernel.instances) == 4


WIDE = [(256, 128), (192, 256), (128, 384), (256, 512), (96, 320), (144, 272)]


@pytest.mark.parametrize("offsets", [None, torch.int64], ids=str)
@pytest.mark.parametrize("dims", WIDE, ids="{0[0]}_{0[1]}".format)
def test_the_backward_of_wide_heads(
    dims: tuple[int, int], offsets: torch.dtype | None, kernel: Kernel
) -> None:
    """dv is a sum over slices of K, all else is of sums over slices of V."""
    check_backward(draw(dims=dims, offsets=offsets))
    of_k = (
        [(128, dims[0] - 128, False), (dims[0] - 128, 128, True)] if dims[0] > 128 else [(dims[0], 0, False)]
    )
    mirrors = [x for x in kernel.launches if x.name == "mirror"]
    assert [(x.shape[8], x.other_dim_k, x.adds) for x in mirrors] == of_k
    for walk in ("left", "right"):
        found = [
            (x.shape[8:10], x.slice and (x.slice[0], *x.slice[2:])) for x in kernel.launches if x.name == walk
        ]
        if dims[1] <= 256:
            assert found == [(dims, None)]
        else:
            rest = dims[1] - 256
            expected = [((dims[0], 256), (rest, True, False)), ((dims[0], rest), (256, False, True))]
            assert found == expected
    names = {instance.name for instance in kernel.instances}
    assert names == {"gla_backward_k128_overlapped", f"gla_states_v{256 if dims[1] > 128 else 128}"}


@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("needs_gates", "with_dht"), [(True, False), (False, True)])
def test_slices_of_v_without_states_or_gates(
    needs_gates: bool, with_dht: bool, of_gates: torch.dtype, kernel: Kernel
) -> None:
    check_backward(draw(dims=(64, 272), of_gates=of_gates, state=False), needs_gates, with_dht)


def test_slices_of_v_have_anchors_of_their_own(kernel: Kernel) -> None:
    check_backward(draw(dims=(64, 512)))
    of_left, of_right = ([x for x in kernel.launches if x.name == name] for name in ("left", "right"))
    at = [x.gates[2][2] for x in of_left]
    assert at == [x.gates[2][2] for x in of_right]
    assert at[1] - at[0] == ANCHOR_BYTES
    assert len({x.slice[1] for x in (*of_left, *of_right)}) == 1  # the sums


@pytest.mark.parametrize("dims", [(256, 512), (144, 272)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_gradients_are_served_for_all_heads_of_the_forward(
    dims: tuple[int, int], requires_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(support.device, "supports", lambda *of: asked.append(of) or SUPPORTED)
    of_call: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16, requires_grad=requires_grad, dim_qk=dims[0],
        dim_v=dims[1], heads=2, value_heads=2, sequences=3,
    )  # fmt: skip
    assert support.supports_gla(of_call).ok
    ((_, instances_of, *key),) = asked
    names = [instance.name for instance in instances_of(*key)]
    states = ["gla_backward_k128_overlapped", "gla_states_v256"] if requires_grad else []
    assert names == ["gla_forward_k128_overlapped", *states]


@pytest.mark.parametrize("dims", [(272, 64), (64, 528), (72, 64)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_other_head_dims_are_refused(dims: tuple[int, int], requires_grad: bool) -> None:
    of_call: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16, requires_grad=requires_grad, dim_qk=dims[0],
        dim_v=dims[1],
    )  # fmt: skip
    verdict = support.supports_gla(of_call)
    assert not verdict.ok
    assert f"K = {dims[0]}, V = {dims[1]}" in verdict.reason
