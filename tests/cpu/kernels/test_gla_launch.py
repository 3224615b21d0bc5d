"""What the host side of GLA hands to its kernel, whose place the reference takes; no GPU is touched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import build, reference
from tfla_tk.backends.tk.channel_gate import launch, support
from tfla_tk.build import Instance
from tfla_tk.calls.gla import GLACore
from tfla_tk.core.layout import ADDRESS_BITS, DTYPES
from tfla_tk.core.memo import Memo

from .addresses import tensor_at

B, T, H = 2, 150, 3
OF_CODE = {code: dtype for dtype, code in DTYPES.items()}
# of a module's forward, as channel_gate/bindings/forward.cpp names them
ARGUMENTS = (
    "shape", "q", "k", "v", "o", "g", "g_dtype", "initial", "last", "scale", "walkers", "other_dim_k", "adds",
)  # fmt: skip


class Kernel:
    """Stands for the module of an instance: computes the reference of what lies at the addresses."""

    def __init__(self) -> None:
        self.instances: list[Instance] = []
        self.launches: list[SimpleNamespace] = []

    def load(self, instance: Instance) -> Kernel:
        self.instances.append(instance)
        return self

    def forward(self, *arguments: Any) -> SimpleNamespace:
        return SimpleNamespace(handle=SimpleNamespace(**dict(zip(ARGUMENTS, arguments, strict=True))))

    def Launches(self, handles: list[SimpleNamespace]) -> SimpleNamespace:
        def run(starts: list[int], stream: int) -> None:
            assert stream == 7
            for handle in handles:
                self.launches.append(handle)
                compute(handle, starts)

        return SimpleNamespace(run=run)


def compute(x: SimpleNamespace, starts: list[int]) -> None:
    offsets, wide, sequences, segments, chunks, batch, heads, seq, dim_k, dim_v, half, _ = x.shape
    assert segments == sequences and 64 * chunks > seq

    def address(prepared: int) -> int:
        return starts[(prepared >> ADDRESS_BITS) - 1] + (prepared & ((1 << ADDRESS_BITS) - 1))

    def tensor(operand: tuple[int, ...], dim: int, dtype: torch.dtype) -> Tensor:
        at, of_batch, of_head, of_row = operand
        # in a batch of one, which TMA wants aligned strides of all the same
        strides = (of_batch if batch > 1 else 0, of_row, of_head, 1)
        return tensor_at(address(at), dtype, (batch, seq, heads, dim), *strides)

    def state(at: int) -> Tensor:
        of_head = (dim_k + x.other_dim_k) * dim_v
        sizes = (sequences, heads, dim_k, dim_v)
        return tensor_at(address(at), torch.float32, sizes, heads * of_head, of_head, dim_v, 1)

    dtype = torch.float16 if half else torch.bfloat16
    dtype_of_offsets = torch.int64 if wide else torch.int32
    o, last = reference.gla_chunkwise(
        *(tensor(operand, dim, dtype) for operand, dim in ((x.q, dim_k), (x.k, dim_k), (x.v, dim_v))),
        tensor(x.g, dim_k, OF_CODE[x.g_dtype]),
        scale=x.scale,
        initial_state=state(x.initial) if x.initial else None,
        output_final_state=True,
        cu_seqlens=tensor_at(address(offsets), dtype_of_offsets, (sequences + 1,)) if offsets else None,
    )
    written = tensor(x.o, dim_v, dtype)
    written.copy_(written + o if x.adds else o)
    if x.last:
        assert last is not None
        state(x.last).copy_(last)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(build, "load", found.load)
    monkeypatch.setattr(launch, "current_stream", lambda device: 7)
    monkeypatch.setattr(launch, "_forwards", Memo())
    return found


def draw(
    dims: tuple[int, int] = (64, 128),
    dtype: torch.dtype = torch.bfloat16,
    of_gates: torch.dtype = torch.float32,
    offsets: torch.dtype | None = None,
    state: bool = True,
    schedule: str = "auto",
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
    return GLACore(q.to(dtype), k.to(dtype), v, g, initial, cu_seqlens, 0.3, schedule)


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


def test_calls_that_record_a_gradient_are_refused() -> None:
    call: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, requires_grad=True)
    verdict = support.supports_gla(call)
    assert not verdict.ok
    assert "gradient" in verdict.reason
    with pytest.raises(NotImplementedError):
        launch.backward(draw(), None, None, torch.ones(1), None, needs_gates=True)
