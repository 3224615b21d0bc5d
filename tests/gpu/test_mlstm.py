"""mLSTM on the GPU, both directions: against the reference in fp64, of whole, cut and packed sequences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.scalar_gate import walks as tk_walks
from tfla_tk.build.instances import MLSTM_TILES

from .accuracy import relative_error
from .linear import REPEATS
from .memory import LENGTHS, TOKENS
from .mlstm import assert_accurate, assert_gradients, check, draw_packed, make_inputs, with_positive_sums

Tensors = dict[str, Tensor]
CutEvery = Callable[[int], None]

NATIVE = list(itertools.product((64, 128, 256), (64, 128, 256, 512)))
PADDED = [(16, 16), (48, 80), (96, 96), (160, 384), (208, 176)]
MAIN = [(64, 64), (128, 128), (128, 256), (256, 512)]
ONE_WALK = [(64, 64), (128, 128), (48, 80)]  # whose backward is one walk
# head dims of cut and packed sequences; the last in parts of 256 and 16 columns of V
CUT = [*MAIN, (48, 80), (208, 176), (80, 272)]
# about one, two and three chunks of 64 and pairs of them
ABOUT_CHUNKS = [1, 64, 65, 127, 128, 129, 192, 193, 257]

of_dims = partial(pytest.mark.parametrize, "dims", ids="{0[0]}_{0[1]}".format)
with_initial = pytest.mark.parametrize("initial", [False, True], ids=["zeros", "initial"])
with_last = pytest.mark.parametrize("last", [False, True], ids=["h", "h_and_state"])


@pytest.mark.product
@of_dims(NATIVE)
def test_native_head_dims(operator: Any, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """Every instance of the kernels, with every gate."""
    check(operator, make_inputs(1, 1, 1, dims, dtype), trains=False)
    for seq in (1, 65):
        check(operator, make_inputs(2, 2, seq, dims, dtype, operator.states), trains=False)
    check(operator, make_inputs(2, 3, 1000, dims, dtype), trains=False)
    for size in ((1, 2, 63), (2, 3, 300)):
        check(operator, make_inputs(*size, dims, dtype, operator.states))


@of_dims(PADDED)
@pytest.mark.parametrize("seq", [1, 64, 130])
def test_padded_head_dims(operator: Any, dtype: torch.dtype, seq: int, dims: tuple[int, int]) -> None:
    check(operator, make_inputs(2, 3, seq, dims, dtype, operator.states), trains=seq > 1)


@pytest.mark.product
@of_dims([*MAIN, (48, 80)])
@pytest.mark.parametrize("seq", [2, 1000, *ABOUT_CHUNKS])
def test_lengths(operator: Any, dtype: torch.dtype, seq: int, dims: tuple[int, int]) -> None:
    x = make_inputs(2, 3, seq, dims, dtype, operator.states)
    check(operator, x, vanishing=seq < 64 and dims not in ONE_WALK)


@pytest.mark.product
@pytest.mark.usefixtures("both_ways")
@of_dims(CUT)
@pytest.mark.parametrize("chunks", [1, 3])
def test_cut_sequences(
    operator: Any, dtype: torch.dtype, chunks: int, dims: tuple[int, int], cut_every: CutEvery
) -> None:
    cut_every(chunks)
    check(operator, make_inputs(2, 3, 1000, dims, dtype, operator.states))


@pytest.mark.product
@pytest.mark.usefixtures("both_ways")
@of_dims(CUT)
@pytest.mark.parametrize("chunks", [1, 2, 100])
def test_packed_sequences(
    operator: Any, dtype: torch.dtype, chunks: int, dims: tuple[int, int], cut_every: CutEvery
) -> None:
    cut_every(chunks)
    check(operator, draw_packed(operator, LENGTHS, dims, dtype))


@pytest.mark.usefixtures("both_ways")
@of_dims(CUT)
@with_initial
@with_last
@pytest.mark.parametrize("chunks", [0, 1, 3], ids=["whole", "1", "3"])
def test_states_and_cuts(
    operator: Any,
    dtype: torch.dtype,
    chunks: int,
    last: bool,
    initial: bool,
    dims: tuple[int, int],
    cut_every: CutEvery,
) -> None:
    cut_every(chunks)
    seq = 1000 if chunks else 300
    check(operator, make_inputs(2, 3, seq, dims, dtype, operator.states if initial else ()), last=last)


@pytest.mark.usefixtures("both_ways")
@of_dims(CUT)
@with_initial
@pytest.mark.parametrize("chunks", [1, 2, 3, 100])
@pytest.mark.parametrize("lengths", [LENGTHS, [*ABOUT_CHUNKS, 0, 700]], ids=["short", "about_chunks"])
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_packed_sequences_of_all_kinds(
    operator: Any,
    dtype: torch.dtype,
    offsets: torch.dtype,
    lengths: list[int],
    chunks: int,
    initial: bool,
    dims: tuple[int, int],
    cut_every: CutEvery,
) -> None:
    cut_every(chunks)
    x = draw_packed(operator, lengths, dims, dtype)
    x["cu_seqlens"] = x["cu_seqlens"].to(offsets)
    check(operator, x if initial else {name: t for name, t in x.items() if name not in operator.states})


@pytest.mark.parametrize("chunks", [1, 4, 100])
@pytest.mark.parametrize("count", [31, 32, 33, 100])
def test_many_packed_sequences(count: int, chunks: int, operator: Any, cut_every: CutEvery) -> None:
    """Offsets are looked at 32 at a time; segments of one chunk cut the longer sequences."""
    cut_every(chunks)
    check(operator, draw_packed(operator, [(7 * n) % 90 for n in range(count)], (64, 64)))


@of_dims(MAIN)
@pytest.mark.parametrize("split", [1, 63, 64, 337, 999])
def test_two_calls_with_the_state_passed_equal_one(operator: Any, split: int, dims: tuple[int, int]) -> None:
    x = make_inputs(2, 3, 1000, dims, states=operator.states)
    first = operator.run({name: t[:, :, :split] if name in TOKENS else t for name, t in x.items()})
    state = {name: first[name[0]] for name in operator.states}
    second = operator.run({name: x[name][:, :, split:] for name in TOKENS} | state)
    whole = torch.cat((first["h"], second["h"]), dim=2)
    truth = operator.truth(x)
    # passing the state leaves its own rounding
    assert_accurate(second | {"h": whole}, truth)
    assert_accurate(operator.run(x), truth)


def test_the_state_is_only_computed_on_request(operator: Any) -> None:
    x = make_inputs()
    h = operator(x)
    assert isinstance(h, Tensor)
    assert torch.equal(h, operator.run(x)["h"])


@of_dims(MAIN)
def test_only_through_the_last_state(operator: Any, dims: tuple[int, int]) -> None:
    """h is not used: the gradient of q is none, or zero."""
    x = make_inputs(2, 3, 300, dims, states=operator.states)
    cotangents = operator.draw_cotangents(x, last=True)
    del cotangents["h"]
    found = operator.gradients(x, cotangents)
    assert not found["q"].any()
    assert_gradients(found, operator.true_gradients(x, cotangents), x["q"].dtype)


@of_dims(MAIN)
def test_against_the_recurrence(exponential: Any, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """The specification itself, token by token."""
    x = make_inputs(1, 2, 150, dims, dtype, exponential.states)
    cotangents = exponential.draw_cotangents(x, last=True)
    expected = exponential.true_gradients(x, cotangents, "reference:recurrent")
    assert_gradients(exponential.gradients(x, cotangents), expected, dtype)


@pytest.mark.parametrize("forget_bias", [0.0, 3.0, 12.0])
def test_forget_gates_of_a_long_sequence(operator: Any, dtype: torch.dtype, forget_bias: float) -> None:
    """df is a sum over tokens: the noise of all of them must not collect in it."""
    x = make_inputs(1, 4, 4096, (128, 256), dtype)
    x["f"] += forget_bias - 3
    check(operator, x, last=False, norm_tolerance=1e-4)


def test_a_cotangent_of_ones(operator: Any) -> None:
    """h.sum(): one element, expanded."""
    x = make_inputs()
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    operator(leaves).sum().backward()
    expected = operator.true_gradients(x, {"h": torch.ones_like(x["v"])})
    assert_gradients({name: t.grad for name, t in leaves.items()}, expected, x["q"].dtype)


def test_gradients_whose_squares_are_beyond_fp32(operator: Any) -> None:
    """Every gradient is linear in dh, whatever its size: so is df, whose noise is weighed by squares."""
    x = make_inputs()
    cotangents = operator.draw_cotangents(x, last=False)
    cotangents["h"] = cotangents["h"] * 2.0**64
    assert_gradients(operator.gradients(x, cotangents), operator.true_gradients(x, cotangents), x["q"].dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dims", NATIVE, ids="{0[0]}_{0[1]}".format)
def test_at_benchmark_size(operator: Any, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    x = make_inputs(8, 16, 8192, dims, dtype)
    found = operator.run(x)
    # a row at a time: the fp64 copies of all would be four times the operands
    for row in range(8):
        truth = operator.truth({name: t[row, None] for name, t in x.items()})
        assert_accurate({name: t[row, None] for name, t in found.items()}, truth)


# cut sequences


@pytest.mark.parametrize("chunks", [7, 8, 9])
def test_anchors_at_and_beside_cuts(operator: Any, chunks: int, cut_every: CutEvery) -> None:
    """An anchor lies before every eighth chunk of a sequence, whatever its segments."""
    cut_every(chunks)
    check(operator, make_inputs(1, 3, 2200, states=operator.states))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("forget_bias", [-8.0, 0.0, 12.0])
@pytest.mark.parametrize("input_bias", [-60.0, 0.0])
def test_segments_that_forget_and_that_do_not(
    operator: Any, input_bias: float, forget_bias: float, cut_every: CutEvery
) -> None:
    """What is forgotten at the end of a segment is skipped, and nothing else."""
    x = with_positive_sums(make_inputs(1, 3, 3000, states=operator.states))
    x["f"] += forget_bias - 3
    # the first third of each segment outweighs the others, where the gates keep it
    x["i"][..., torch.arange(3000, device="cuda") % 1024 > 300] += input_bias
    cut_every(16)
    check(operator, x, vanishing=True, norm_tolerance=1e-4)


def test_a_small_normaliser_outweighs_the_gates(exponential: Any, cut_every: CutEvery) -> None:
    """The gates leave 2^-185 of the only rows with a gradient, but these are divided by 2^-100."""
    x = make_inputs(1, 2, 512, (64, 64))
    x["i"].fill_(80.0)
    x["f"].fill_(-math.log(math.e - 1))  # log f = -1
    x["k"][..., 1:] = 0
    x["q"][..., 0] = 0  # q.n = 0: the normaliser is eps
    dh = torch.zeros_like(x["v"])
    dh[:, :, 384:400] = 1

    def dk(tensors: Tensors, dh: Tensor, backend: str) -> Tensor:
        k = tensors["k"].clone().requires_grad_()
        h = exponential(tensors | {"k": k}, backend, eps=1e-30)
        return torch.autograd.grad(h, k, dh)[0][:, :, :256]

    cut_every(4)
    expected = dk({name: t.double() for name, t in x.items()}, dh.double(), "reference")
    assert 0 < expected.abs().max().item() < 2**-70
    assert relative_error(dk(x, dh, "tk"), expected) <= 8e-3


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("gate", ["i", "f"])
@pytest.mark.parametrize("position", [70, 957, 1000, 1001, 1063, 1950])  # odd ones too: each lane has two
def test_a_nan_gate_shows_behind_a_cut(operator: Any, position: int, gate: str, cut_every: CutEvery) -> None:
    """In all that follows it in the walk of a gradient, as far as other segments are concerned."""
    length = 15 * segments.CHUNK
    x = make_inputs(1, 3, 2000)
    x["f"] -= 6  # everything is forgotten within a segment
    x[gate][:, 1, position] = torch.nan
    cut_every(15)
    h = operator(x)
    assert h[:, [0, 2]].isfinite().all() and h[:, 1, position:].isnan().all()
    found = operator.gradients(x, operator.draw_cotangents(x, last=False))
    assert all(t[:, [0, 2]].isfinite().all() for t in found.values())
    segment = position // length
    behind = found["q"][:, 1, (segment + 1) * length :]
    before = [found[name][:, 1, : segment * length] for name in ("k", "v")]
    assert behind.numel() + before[0].numel() > 0
    assert all(t.isnan().all() for t in (behind, *before))


@pytest.mark.slow
@of_dims(MAIN)
def test_long_sequences_are_cut_by_the_rule(operator: Any, dims: tuple[int, int]) -> None:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    found = tk_walks.cut_sequences((1, 2, 8192, *dims), 1, multiprocessors, packed=False)
    assert found.segments > 8
    check(operator, make_inputs(1, 2, 8192, dims, states=operator.states))


def chunk_slots(lengths: list[int]) -> list[int]:
    """The slots of chunk_m that hold a chunk of a sequence, one after the other; the others hold nothing."""
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return [
        start // segments.CHUNK + sequence + chunk
        for sequence, (start, length) in enumerate(zip(starts, lengths, strict=False))
        for chunk in range(-(-length // segments.CHUNK))
    ]


@pytest.mark.parametrize("chunks", [2, 100])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@with_initial
def test_rows_for_the_backward(
    operator: Any, initial: bool, packed: bool, chunks: int, cut_every: CutEvery
) -> None:
    """row_n, row_m and chunk_m against the fp64 CPU implementation of the op."""
    x = make_inputs(2, 3, sum(LENGTHS), states=operator.states)
    if packed:
        x = draw_packed(operator, LENGTHS, (128, 256))
    x = with_positive_sums(x)
    offsets = x.get("cu_seqlens")
    cut_every(chunks)
    sigmoid_gate = operator.function == "mlstm_siging_chunkwise"
    normalize = operator.options.get("normalize", True)
    options = (sigmoid_gate, normalize, 1e-6, False, True)

    def op(tensors: list[Tensor | None], offsets: Tensor | None) -> list[Tensor]:
        return list(torch.ops.tfla_tk.mlstm_fwd(*tensors, offsets, *options))

    states = ("c_initial", "n_initial", "m_initial")
    tensors = [x[name] for name in TOKENS] + [x.get(name) if initial else None for name in states]
    *_, row_n, row_m, chunk_m = op(tensors, offsets)
    *_, true_n, true_m, true_chunk_m = op(
        [None if t is None else t.double().cpu() for t in tensors], None if offsets is None else offsets.cpu()
    )
    for found, truth, wanted in ((row_n, true_n, normalize), (row_m, true_m, not sigmoid_gate)):
        assert found.shape == (x["i"].shape if wanted else (0,))
        assert found.dtype == torch.float32
        # the scores are rounded to the operands' dtype nowhere on their way to row_n
        assert relative_error(found.cpu(), truth) <= (1e-4 if wanted else 0)
    assert chunk_m.dtype == torch.float32 and chunk_m.shape == true_chunk_m.shape
    if not sigmoid_gate:
        used = chunk_slots(LENGTHS if packed else [sum(LENGTHS)])
        sums, true_sums = (m.double().sum(-1)[..., used] for m in (chunk_m.cpu(), true_chunk_m))
        assert relative_error(sums, true_sums) <= 1e-6


# one walk


@of_dims(ONE_WALK)
def test_states_made_again_are_the_same(operator: Any, dims: tuple[int, int]) -> None:
    """Where autograd keeps none of the forward's: the gradients have the same bits. So has h without them."""
    x = make_inputs(2, 3, 1000, dims, states=operator.states)
    cotangents = operator.draw_cotangents(x, True)
    kept = operator.gradients(x, cotangents)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        made = operator.gradients(x, cotangents)
    assert all(torch.equal(made[name], grad) for name, grad in kept.items())
    trained = operator({name: t.clone().requires_grad_(name == "v") for name, t in x.items()})
    assert torch.equal(trained, operator(x))


@of_dims(ONE_WALK)
@pytest.mark.parametrize("first", [64, 100, 128, 170])
@pytest.mark.parametrize("forget", [-4.0, -12.0, -40.0])
def test_gates_that_close_in_either_chunk_of_a_pair(
    operator: Any, forget: float, first: int, dims: tuple[int, int]
) -> None:
    x = make_inputs(2, 3, 400, dims, states=operator.states)
    x["f"][..., first], x["f"][..., first + 3] = forget, forget
    check(operator, with_positive_sums(x), norm_tolerance=1e-4)


# repeats


@pytest.mark.usefixtures("both_ways")
@of_dims([*MLSTM_TILES, (128, 512), (256, 512)])
@pytest.mark.parametrize("chunks", [0, 2], ids=["whole", "cut"])
def test_repeats_are_bitwise_equal(
    operator: Any, dtype: torch.dtype, chunks: int, dims: tuple[int, int], cut_every: CutEvery
) -> None:
    cut_every(chunks)
    x = make_inputs(2, 17, 450, dims, dtype, operator.states)
    cotangents = operator.draw_cotangents(x, last=True)

    def both() -> Tensors:
        grads = operator.gradients(x, cotangents)
        return operator.run(x) | {f"d{name}": grad for name, grad in grads.items()}

    first = both()
    assert all(t.isfinite().all() for t in first.values())
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        for name, t in both().items():
            different += (first[name] != t).sum()
    assert different.item() == 0


@of_dims([(128, 256), (256, 512)])
def test_repeats_of_the_sequential_kernels(operator: Any, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    x = make_inputs(2, 40, 450, dims, dtype, operator.states)
    first = operator.run_sequential(x)
    assert_accurate(first, operator.truth(x))
    for _ in range(20):
        again = operator.run_sequential(x)
        assert all(torch.equal(again[name], t) for name, t in first.items())
