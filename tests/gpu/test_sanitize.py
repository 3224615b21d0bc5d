"""Small calls of every kind of kernel for compute-sanitizer (``make sanitize``).

mLSTM's inputs are drawn and judged on the CPU: the sanitizer sees little more than the kernels. Decoding and
the small kernels of the mLSTM backward have such tests beside their others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from . import families
from .delta_rule import SEGMENT
from .families import RAW, Case, compute, delta, draw, gated_delta, gla, simple_gla
from .mlstm import assert_accurate, compare, draw_packed, make_inputs

# one instance with one state warpgroup, one with two, one whose heads take several slices of V, and the one
# state warpgroup of that kernel
TILES = [(64, 64), (128, 256), (256, 512), (256, 64)]
SEQ = 450  # eight chunks, the last one short: every place of every ring is used twice at least

pytestmark = pytest.mark.sanitize


def to_gpu(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.cuda() for name, t in x.items()}


def to_cpu(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.cpu() for name, t in x.items()}


@pytest.mark.parametrize("dims", TILES, ids="{0[0]}_{0[1]}".format)
def test_mlstm(operator: Any, dims: tuple[int, int]) -> None:
    """From an initial state."""
    x = make_inputs(1, 2, SEQ, dims, states=operator.states, device="cpu")
    assert_accurate(to_cpu(operator.run(to_gpu(x))), operator.truth(x))


@pytest.mark.parametrize("dims", [(128, 256), (256, 512)], ids="{0[0]}_{0[1]}".format)
def test_the_sequential_kernels(dims: tuple[int, int], exponential: Any) -> None:
    x = make_inputs(1, 2, SEQ, dims, device="cpu")
    assert_accurate(to_cpu(exponential.run_sequential(to_gpu(x))), exponential.truth(x))


def test_half(operator: Any) -> None:
    """fp16 at K = 256, whose values the sigmoid gate scales otherwise; rows are held larger for a while."""
    x = make_inputs(1, 2, SEQ, (256, 512), torch.float16, operator.states, device="cpu")
    x["i"][..., 100:230] -= 12.0
    x["f"][..., 100:230] = -10.0
    assert_accurate(to_cpu(operator.run(to_gpu(x))), operator.truth(x))


@pytest.mark.parametrize("seq", [1, 65])
def test_padding(seq: int, exponential: Any) -> None:
    """Head dims that fill no tile, in [B, S, NH, D] memory, with nothing behind the last row."""
    x = make_inputs(1, 2, seq, (48, 80), torch.float16, exponential.states, device="cpu")
    on_gpu = to_gpu(x)
    for name in ("q", "k", "v"):
        on_gpu[name] = on_gpu[name].transpose(1, 2).contiguous().transpose(1, 2)
    assert_accurate(to_cpu(exponential.run(on_gpu)), exponential.truth(x))


@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (48, 80), (128, 256), (256, 512)], ids="{0[0]}_{0[1]}".format
)
def test_mlstm_backward(operator: Any, dims: tuple[int, int]) -> None:
    """Five chunks, the last one short, from an initial state."""
    compare(operator, make_inputs(1, 2, 290, dims, states=operator.states))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dims", [(64, 64), (128, 256), (256, 512)], ids="{0[0]}_{0[1]}".format)
def test_mlstm_backward_of_segments(
    operator: Any, dims: tuple[int, int], cut_every: Callable[[int], None]
) -> None:
    """Packed sequences in segments of one chunk."""
    cut_every(1)
    compare(operator, draw_packed(operator, [130, 0, 65], dims))


IN_WALK = [
    gated_delta(128, 128, form="in walk"),
    gated_delta(128, 192, form="in walk"),
    delta(128, 256, form="in walk"),
]
GLA = [
    gla(*dims)
    for dims in (
        *((64, 64), (64, 128), (128, 64), (128, 128), (128, 192), (64, 256)),
        *((128, 256), (208, 128), (256, 256), (144, 272)),
    )
]
CASES = [
    *(simple_gla(*dims, group=2) for dims in ((64, 64), (128, 256), (256, 512))),
    *(
        gated_delta(*dims, group=2, form=form)
        for form, all_dims in {
            "": ((64, 64), (128, 128), (256, 192), (128, 384)),
            "before": ((64, 64), (128, 128), (128, 384)),
            "leads": ((64, 64), (128, 128), (128, 192)),
            "carried": ((64, 64), (128, 128), (128, 192)),
        }.items()
        for dims in all_dims
    ),
    gated_delta(48, 64, group=3, flags=RAW),
    *IN_WALK,
    *GLA,
    *(gla(*dims, form="cut") for dims in ((128, 256), (144, 272))),
]
SMALL = [
    *((case, "batch") for case in CASES),
    *((case, "packed") for case in (*IN_WALK, gated_delta(128, 128), gla(128, 256))),
    *((case, "closed") for case in GLA),
    (gla(128, 256), "fp16"),
]


def name_of(x: Case | str) -> str:
    return "-".join((x.function, *map(str, x.dims), x.form)) if isinstance(x, Case) else x


@pytest.mark.parametrize(("case", "kind"), SMALL, ids=name_of)
def test_small_calls(case: Case, kind: str, take_form: Callable[[str], None]) -> None:
    """Of every kind of tile: every place of every ring is used twice. The second head forgets slowly."""
    take_form(case.form)
    offsets = None
    if kind == "packed":
        x, offsets = families.draw_packed(case, [70, 0, 1, 450, 190])
    else:
        seq = 2 * SEGMENT + 70 if case.form in ("leads", "carried") else 570
        x = draw(case, 1, seq, dtype=torch.float16 if kind == "fp16" else torch.bfloat16)
    if "g" in x:
        x["g"][:, :, 1] *= 1e-3
        if kind == "closed":
            x["g"][:, ::37] = -50.0
    found = compute(case, x, offsets)
    torch.cuda.synchronize()
    assert all(t.isfinite().all() for t in found.values())


@pytest.mark.parametrize("case", [gla(64, 64), gla(128, 192), gla(144, 272)], ids=name_of)
def test_more_ctas_than_run_at_once(case: Case) -> None:
    found = compute(case, draw(case, 70, 180))
    torch.cuda.synchronize()
    assert all(t.isfinite().all() for t in found.values())
