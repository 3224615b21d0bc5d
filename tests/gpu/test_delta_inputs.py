"""Raw inputs of the delta rule on the GPU: the norm, the sigmoid and the gate by its functions' flags."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch

from tfla_tk import chunk_delta_rule, chunk_gated_delta_rule

from .delta_rule import draw
from .linear import Tensors, assert_whole_and_repeated, both, check_both, pack
from .memory import LENGTHS

FLAGS = {
    "qk_l2norm": "use_qk_l2norm_in_kernel",
    "beta_sigmoid": "use_beta_sigmoid_in_kernel",
    "twice": "allow_neg_eigval",  # the sigmoid of beta
    "gate": "use_gate_in_kernel",
}
ALL = tuple(FLAGS)
SOME = [
    found
    for count in range(1, len(FLAGS) + 1)
    for found in itertools.combinations(FLAGS, count)
    if "beta_sigmoid" in found or "twice" not in found
]


def options_of(made: tuple[str, ...]) -> dict[str, Any]:
    return {FLAGS[name]: True for name in made}


def draw_raw(*args: Any, made: tuple[str, ...] = ALL, **options: Any) -> Tensors:
    """Inputs that such flags are for."""
    x = draw(*args, **options)
    if "qk_l2norm" in made:
        x |= {"q": 0.5 * x["q"], "k": 3 * x["k"]}
    if "beta_sigmoid" in made:
        x["beta"] = 4 * x["beta"] - 2
    if "gate" in made:
        heads = x["v"].shape[2]
        x["g"] = 4 * x["g"] + 2
        x["A_log"] = torch.linspace(-1, 0.5, heads).cuda()
        x["dt_bias"] = torch.linspace(0.5, -2, heads).cuda()
    return x


@pytest.mark.parametrize("made", SOME, ids="+".join)
def test_every_flag(made: tuple[str, ...], dtype: torch.dtype) -> None:
    check_both(draw_raw(2, 200, 2, 4, made=made, dtype=dtype), chunk_gated_delta_rule, **options_of(made))


@pytest.mark.parametrize(
    "dims",
    [(64, 64), (16, 32), (48, 80), (96, 192), (112, 64), (192, 64), (256, 144)],
    ids="{0[0]}_{0[1]}".format,
)
def test_all_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    check_both(draw_raw(2, 200, 3, dims=dims, dtype=dtype), chunk_gated_delta_rule, **options_of(ALL))


@pytest.mark.parametrize("seq", [1, 31, 33, 1000])
@pytest.mark.parametrize("heads", [1, 33])
def test_any_length_and_heads(seq: int, heads: int) -> None:
    check_both(draw_raw(1, seq, heads, dims=(64, 64)), chunk_gated_delta_rule, **options_of(ALL))


@pytest.mark.parametrize("value_heads", [2, 6])
def test_packed_sequences(value_heads: int) -> None:
    x = pack(draw_raw(1, sum(LENGTHS), 2, value_heads, sequences=len(LENGTHS)))
    check_both(x, chunk_gated_delta_rule, **options_of(ALL))


def test_without_decay(dtype: torch.dtype) -> None:
    x = draw_raw(2, 200, made=("qk_l2norm",), dtype=dtype)
    del x["g"]
    check_both(x, chunk_delta_rule, **options_of(("qk_l2norm",)))


def test_gates_of_16_bits_without_bias() -> None:
    """Of any stride."""
    x = draw_raw(2, 200)
    del x["dt_bias"]
    x |= {name: x[name].bfloat16().repeat_interleave(2, -1)[..., ::2] for name in ("g", "beta", "A_log")}
    check_both(x, chunk_gated_delta_rule, **options_of(ALL))


def test_rows_of_norm_zero() -> None:
    """Of which nothing is read or written; their gradients are 1000 times those of the normalised rows."""
    x = draw_raw(1, 300)
    x["q"][:, 10:200:20] = 0
    x["k"][:, 17:200:20] = 0
    few = {name: 1.5e-2 for name in ("dq", "dk")}
    check_both(x, chunk_gated_delta_rule, few, **options_of(ALL))


def test_gates_far_from_zero() -> None:
    """Where the softplus is its argument, and where it and the sigmoid vanish.

    dA_log and ddt_bias are sums over few tokens then: of the errors of dg in bf16, little averages out.
    """
    x = draw_raw(1, 300)
    x["g"][:, ::3] = -30
    x["g"][:, 1::30] = 25
    x["beta"][:, ::5] = -20
    x["beta"][:, 1::5] = 20
    wider = {"dA_log": 4e-2, "ddt_bias": 4e-2}
    check_both(x, chunk_gated_delta_rule, wider, **options_of(ALL))


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_results_are_written_whole_and_always_the_same(packed: bool) -> None:
    """Those of A_log and dt_bias, too."""
    x = draw_raw(2, 700, 2, 4)
    if packed:
        x = pack(draw_raw(1, sum(LENGTHS), 2, 4, (96, 80), sequences=len(LENGTHS)))
    assert_whole_and_repeated(lambda: both(x, chunk_gated_delta_rule, **options_of(ALL)))


def test_training_adds_no_memory_but_that_of_normalised_rows() -> None:
    """Between forward and backward nothing is kept but what a call of made inputs keeps."""

    def requested() -> int:
        """Bytes that tensors have asked for: what they are given depends on what was freed before."""
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    def kept(**options: Any) -> int:
        x = {name: t.detach().requires_grad_() for name, t in draw_raw(1, 4096, 4, states=False).items()}
        if not options:
            del x["A_log"], x["dt_bias"]
        for _ in range(2):  # the first one makes what is kept for all calls
            gc.collect()
            before = requested()
            o, _ = chunk_gated_delta_rule(**x, **options, backend="tk")
            found = requested() - before
            o.sum().backward()
            del o
        return found

    assert kept(**options_of(ALL)) == kept()
