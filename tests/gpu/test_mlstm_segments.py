"""mLSTM forward on the GPU over cut and packed sequences: the cuts do not show in the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk.backends.tk import segments

from .memory import LENGTHS, TOKENS

Tensors = dict[str, Tensor]
Make = Callable[..., Tensors]
Check = Callable[..., None]

MAIN = [(64, 64), (128, 128), (128, 256), (256, 512)]
PADDED = [(48, 80), (208, 176)]


def pack(x: Tensors, lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensors:
    """x with the offsets of its packed sequences."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return x | {"cu_seqlens": ends.to(x["q"].device, dtype)}


def chunk_slots(lengths: list[int]) -> list[int]:
    """The slots of chunk_m that hold a chunk of a sequence, one after the other; the others hold nothing."""
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return [
        start // segments.CHUNK + sequence + chunk
        for sequence, (start, length) in enumerate(zip(starts, lengths, strict=False))
        for chunk in range(-(-length // segments.CHUNK))
    ]


def with_states(make: Make, x: Tensors, names: tuple[str, ...], count: int) -> Tensors:
    """x with one initial state per packed sequence."""
    _, heads, _, dim_qk = x["q"].shape
    drawn = make(count, heads, 1, (dim_qk, x["v"].shape[-1]), states=names, seed=1)
    return x | {name: drawn[name] for name in names}


@pytest.mark.parametrize("dims", [*MAIN, *PADDED], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("initial", [False, True], ids=["zeros", "initial"])
def test_cut_sequences(
    operator: Any,
    dtype: torch.dtype,
    initial: bool,
    chunks: int,
    dims: tuple[int, int],
    cut_every: Callable[[int], None],
    make_inputs: Make,
    assert_accurate: Check,
) -> None:
    x = make_inputs(2, 3, 1000, dims, dtype, operator.states if initial else ())
    cut_every(chunks)
    assert_accurate(operator.run(x), operator.truth(x))


@pytest.mark.parametrize("forget_bias", [-8.0, 0.0, 12.0])
@pytest.mark.parametrize("input_bias", [-60.0, 0.0])
def test_segments_that_forget_and_that_do_not(
    operator: Any,
    input_bias: float,
    forget_bias: float,
    cut_every: Callable[[int], None],
    make_inputs: Make,
    assert_accurate: Check,
) -> None:
    """The sum of a segment skips what is forgotten at the end of a segment, and nothing else."""
    x = make_inputs(2, 3, 3000)
    x["f"] += forget_bias - 3
    for name in ("q", "k"):  # keeps q.n away from zero
        x[name].abs_()
    # the first third of each segment outweighs the others, where the gates keep it
    x["i"][..., torch.arange(3000, device="cuda") % 1024 > 300] += input_bias
    cut_every(16)
    assert_accurate(operator.run(x), operator.truth(x), norm_tolerance=1e-4)


@pytest.mark.parametrize("gate", ["i", "f"])
@pytest.mark.parametrize("position", [70, 900, 957])
def test_a_nan_gate_shows_behind_a_cut(
    operator: Any, position: int, gate: str, cut_every: Callable[[int], None], make_inputs: Make
) -> None:
    x = make_inputs(1, 3, 2000)
    x["f"] -= 6  # everything is forgotten within a segment
    x[gate][:, 1, position] = torch.nan
    cut_every(15)
    h = operator(x)
    assert h[:, [0, 2]].isfinite().all()
    assert h[:, 1, position:].isnan().all()


@pytest.mark.parametrize("dims", [*MAIN, *PADDED], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("chunks", [1, 2, 100])
@pytest.mark.parametrize("initial", [False, True], ids=["zeros", "initial"])
def test_packed_sequences(
    operator: Any,
    dtype: torch.dtype,
    initial: bool,
    chunks: int,
    dims: tuple[int, int],
    cut_every: Callable[[int], None],
    make_inputs: Make,
    assert_accurate: Check,
) -> None:
    x = make_inputs(1, 3, sum(LENGTHS), dims, dtype)
    if initial:
        x = with_states(make_inputs, x, operator.states, len(LENGTHS))
    cut_every(chunks)
    packed = pack(x, LENGTHS, torch.int64 if initial else torch.int32)
    assert_accurate(operator.run(packed), operator.truth(packed))


def test_packed_in_model_layout(operator: Any, make_inputs: Make, assert_accurate: Check) -> None:
    x = make_inputs(1, 3, sum(LENGTHS))
    packed = pack(x, LENGTHS)
    expected = operator.run(packed)
    for name in ("q", "k", "v"):
        packed[name] = x[name].transpose(1, 2).contiguous().transpose(1, 2)
    found = operator.run(packed)
    assert all(torch.equal(found[name], t) for name, t in expected.items())


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("count", [31, 32, 33, 100])
def test_many_packed_sequences(
    count: int,
    chunks: int,
    operator: Any,
    cut_every: Callable[[int], None],
    make_inputs: Make,
    assert_accurate: Check,
) -> None:
    """Offsets are looked at 32 at a time; segments of one chunk cut the longer sequences."""
    lengths = [(7 * n) % 90 for n in range(count)]
    cut_every(chunks)
    packed = pack(make_inputs(1, 2, sum(lengths), (64, 64)), lengths)
    assert_accurate(operator.run(packed), operator.truth(packed))


@pytest.mark.parametrize("chunks", [1, 100])
def test_packed_sequences_do_not_see_each_other(
    operator: Any, chunks: int, cut_every: Callable[[int], None], make_inputs: Make
) -> None:
    x = make_inputs(1, 3, sum(LENGTHS))
    cut_every(chunks)
    expected = operator.run(pack(x, LENGTHS))
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    for broken in (3, 7):
        rows = slice(starts[broken], starts[broken + 1])
        changed = {name: t.clone() for name, t in x.items()}
        for name in TOKENS:
            changed[name][:, :, rows] = torch.nan
        found = operator.run(pack(changed, LENGTHS))
        assert found["h"][:, :, rows].isnan().all()
        for start, end in ((0, rows.start), (rows.stop, starts[-1])):
            assert torch.equal(found["h"][:, :, start:end], expected["h"][:, :, start:end])
        others = [n for n in range(len(LENGTHS)) if n != broken]
        assert all(torch.equal(found[name][others], expected[name][others]) for name in found if name != "h")


@pytest.mark.parametrize("chunks", [2, 100])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("initial", [False, True], ids=["zeros", "initial"])
def test_rows_for_the_backward(
    operator: Any,
    initial: bool,
    packed: bool,
    chunks: int,
    cut_every: Callable[[int], None],
    make_inputs: Make,
    rel_err: Callable[[Tensor, Tensor], float],
) -> None:
    """row_n, row_m and chunk_m against the fp64 CPU implementation of the op."""
    x = make_inputs(1 if packed else 2, 3, sum(LENGTHS))
    if initial:
        x = with_states(make_inputs, x, operator.states, len(LENGTHS) if packed else 2)
    for name in ("q", "k", "n_initial"):
        if name in x:
            x[name].abs_()
    offsets = pack(x, LENGTHS)["cu_seqlens"] if packed else None
    cut_every(chunks)
    sigmoid_gate = operator.function == "mlstm_siging_chunkwise"
    normalize = operator.options.get("normalize", True)
    options = (sigmoid_gate, normalize, 1e-6, False, True)

    def op(tensors: list[Tensor | None], offsets: Tensor | None) -> list[Tensor]:
        return list(torch.ops.tfla_tk.mlstm_fwd(*tensors, offsets, *options))

    tensors = [x.get(name) for name in (*TOKENS, "c_initial", "n_initial", "m_initial")]
    *_, row_n, row_m, chunk_m = op(tensors, offsets)
    *_, true_n, true_m, true_chunk_m = op(
        [None if t is None else t.double().cpu() for t in tensors],
        None if offsets is None else offsets.cpu(),
    )
    for found, truth, wanted in ((row_n, true_n, normalize), (row_m, true_m, not sigmoid_gate)):
        assert found.shape == (x["i"].shape if wanted else (0,))
        assert found.dtype == torch.float32
        # the scores are rounded to the operands' dtype nowhere on their way to row_n
        assert rel_err(found.cpu(), truth) <= (1e-4 if wanted else 0)
    assert chunk_m.dtype == torch.float32 and chunk_m.shape == true_chunk_m.shape
    if not sigmoid_gate:
        used = chunk_slots(LENGTHS if packed else [sum(LENGTHS)])
        sums, true_sums = (m.double().sum(-1)[..., used] for m in (chunk_m.cpu(), true_chunk_m))
        assert rel_err(sums, true_sums) <= 1e-6


@pytest.mark.parametrize("dims", MAIN, ids="{0[0]}_{0[1]}".format)
def test_repeats_of_a_cut_call_are_bitwise_equal(
    operator: Any, dims: tuple[int, int], cut_every: Callable[[int], None], make_inputs: Make
) -> None:
    x = make_inputs(1, 5, 3000, dims, states=operator.states)
    cut_every(7)
    first = operator.run(x)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        again = operator.run(x)
        for name, t in first.items():
            different += (again[name] != t).sum()
    assert different.item() == 0


def test_long_sequences_are_cut_by_the_rule(operator: Any, make_inputs: Make, assert_accurate: Check) -> None:
    x = make_inputs(1, 4, 20_000)
    assert segments.cut(1, 20_000, 4, torch.cuda.get_device_properties(0).multi_processor_count).segments > 8
    assert_accurate(operator.run(x), operator.truth(x))


def test_cut_calls_are_captured(operator: Any, make_inputs: Make) -> None:
    x = make_inputs(1, 2, 8000, states=operator.states)
    operator.run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = operator.run(x)
    fresh = make_inputs(1, 2, 8000, states=operator.states, seed=1)
    for name, t in fresh.items():
        x[name].copy_(t)
    graph.replay()
    expected = operator.run(fresh)
    assert all(torch.equal(captured[name], t) for name, t in expected.items())
