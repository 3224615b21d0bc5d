"""How calls of every family run on the GPU: repeats, memory, layouts, graphs, streams, torch.compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from . import memory
from .delta_rule import LONG, SEGMENT
from .families import (
    RAW,
    Case,
    compute,
    delta,
    draw,
    draw_packed,
    gated_delta,
    gla,
    is_of_states,
    kda,
    mlstm,
    simple_gla,
)
from .linear import (
    Tensors,
    assert_equal,
    assert_equal_on_streams,
    assert_graph_replays,
    assert_whole_and_repeated,
)
from .memory import LENGTHS, OPERANDS

CASES = {
    "mlstm_exp_64": mlstm("exp", 64, 64),
    "mlstm_exp": mlstm("exp", 128, 256),
    "mlstm_exp_512": mlstm("exp", 256, 512),
    "mlstm_sig": mlstm("sig", 128, 128),
    "mlstm_sig_padded": mlstm("sig", 48, 80),
    "mlstm_unnormalised": mlstm("sig_unnormalised", 128, 256),
    "simple_gla": simple_gla(64, 64),
    "simple_gla_padded": simple_gla(48, 80),
    "simple_gla_grouped": simple_gla(128, 256, group=2),
    "retention": Case("chunk_retention", (256, 512)),
    "delta": delta(128, 128),
    "delta_raw": delta(64, 64, flags=RAW[:1]),
    "gated_delta_64": gated_delta(64, 64),
    "gated_delta": gated_delta(128, 128, group=2),
    "gated_delta_padded": gated_delta(96, 80),
    "gated_delta_turns": gated_delta(192, 128, group=3),
    "gated_delta_wide": gated_delta(256, 320),
    "gated_delta_raw": gated_delta(128, 128, group=2, flags=RAW),
    "gla_64": gla(64, 64),
    "gla": gla(128, 128),
    "gla_padded": gla(96, 208),
    "gla_shared": gla(128, 256),
    "gla_sums": gla(208, 128),
    "gla_wide": gla(256, 512),
    "kda_64": kda(64, 64),
    "kda": kda(128, 128, group=2),
    "kda_padded": kda(96, 80),
    "kda_wide": kda(128, 256, trains=False),
    "kda_raw": kda(128, 128, group=2, flags=RAW),
}
FORMS = {
    "mlstm_cut": replace(CASES["mlstm_exp"], form="cut"),
    "mlstm_cut_512": mlstm("sig", 256, 512, form="cut"),
    "simple_gla_cut": replace(CASES["simple_gla_grouped"], form="cut"),
    "delta_in_walk": delta(128, 256, form="in walk"),
    "gated_delta_in_walk": gated_delta(128, 128, form="in walk"),
    "gated_delta_in_walk_grouped": gated_delta(128, 256, group=3, form="in walk"),
    "gated_delta_leads": gated_delta(96, 80, group=2, form="leads"),
    "gated_delta_carried": gated_delta(128, 128, group=2, form="carried"),
    "gla_cut": gla(96, 80, form="cut"),
    "gla_cut_wide": gla(192, 384, form="cut"),
}
SPLIT = ("leads", "carried")  # forms of long sequences
# in calls of these one packed sequence is NaN; those of the delta rule are made without gradients
WITH_NAN = [
    name
    for name, case in (CASES | FORMS).items()
    if name.startswith(("mlstm", "gla", "delta", "gated_delta", "kda")) and case.form not in SPLIT
]
# whose gradients have the same bits, whether or not the forward keeps states for them
COMPILED = [
    *("mlstm_exp_64", "mlstm_exp", "mlstm_sig", "mlstm_unnormalised", "simple_gla", "simple_gla_grouped"),
    *("delta", "gated_delta_64", "gated_delta", "gated_delta_raw", "gla", "kda", "kda_raw"),
]


@pytest.fixture(params=[*CASES, *FORMS])
def case(request: pytest.FixtureRequest, take_form: Callable[[str], None]) -> Case:
    """Forced into its form."""
    found = (CASES | FORMS)[request.param]
    take_form(found.form)
    return found


def draw_batch(case: Case, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Sequences of several chunks, the last one short, and of several segments of a split."""
    return draw(case, batch, 3 * SEGMENT + 77 if case.form in SPLIT else 450, seed, dtype)


def draw_inputs(
    case: Case, packed: bool, seed: int = 0, dtype: torch.dtype = torch.bfloat16, batch: int = 2
) -> tuple[Tensors, Tensor | None]:
    """A batch or packed sequences, and the offsets of these."""
    if packed:
        return draw_packed(case, LONG if case.form in SPLIT else LENGTHS, seed, dtype)
    return draw_batch(case, batch, seed, dtype), None


of_a_batch_and_packed = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])


@pytest.mark.parametrize("batch", [2, 70, None], ids=["batch", "many", "packed"])
def test_results_are_written_whole_and_always_the_same(
    case: Case, batch: int | None, dtype: torch.dtype
) -> None:
    """Also where there are more CTAs than run at once."""
    x, offsets = draw_inputs(case, batch is None, dtype=dtype, batch=batch or 0)
    assert_whole_and_repeated(lambda: compute(case, x, offsets))


@of_a_batch_and_packed
def test_a_graph_replays(case: Case, packed: bool) -> None:
    x, offsets = draw_inputs(case, packed)
    other, _ = draw_inputs(case, packed, seed=1)

    def call(of_call: Tensors) -> Tensors:
        return compute(case, of_call, offsets)

    assert_graph_replays(call, x, other, [call(other), call(x)], 10)


def test_on_several_streams(case: Case) -> None:
    x = draw_batch(case, 8)
    assert_equal_on_streams(lambda: compute(case, x), compute(case, x), 5)


def test_the_current_stream_is_taken_and_not_waited_for(case: Case) -> None:
    case = case.forward
    x = draw_batch(case)
    expected = compute(case, x)
    late = {name: torch.full_like(t, torch.nan) for name, t in x.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
        for name, t in x.items():
            late[name].copy_(t)
        found = compute(case, late)
    assert not stream.query()  # the host is back while the stream still sleeps
    stream.synchronize()
    assert_equal(found, expected)


@of_a_batch_and_packed
def test_no_host_synchronisation(case: Case, packed: bool) -> None:
    """Of calls like those before."""
    x, offsets = draw_inputs(case, packed)
    compute(case, x, offsets)
    torch.cuda.set_sync_debug_mode("error")
    try:
        compute(case, x, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "layout", ["transposed", "shifted", "odd_rows", "shifted_transposed", "head_last", "fused"]
)
def test_any_layout(case: Case, layout: str) -> None:
    """The same bits of views. Those whose rows are aligned are read in place, others are copied."""
    x = draw_batch(case)
    views = {name: t.mT.contiguous().mT for name, t in x.items() if name in case.gates and t.dim() == 3}
    if layout == "fused":
        views |= memory.fuse({name: x[name] for name in OPERANDS[: 2 if case.group > 1 else 3]})
    else:
        views |= {name: getattr(memory, layout)(x[name]) for name in OPERANDS}
    if case.channels("g") and layout not in ("head_last", "fused"):
        views["g"] = getattr(memory, layout)(x["g"])
    views |= {name: memory.head_last(x[name]) for name in ("c_initial", "initial_state") if name in x}
    views["do"] = memory.transposed(x["do"])
    assert_equal(compute(case, x | views), compute(case, x))


@pytest.mark.parametrize("name", ["gla", "gated_delta", "gated_delta_raw", "kda_raw"])
def test_gates_without_gradients(name: str) -> None:
    """The other gradients are bitwise the same."""
    case = replace(CASES[name], group=1)
    x = draw(case, 2, 300)
    expected = compute(case, x)
    del expected["dg"]
    assert_equal(compute(case, x, fixed=("g",)), expected)


def test_what_a_call_reads_is_left_alone(case: Case) -> None:
    x = draw_batch(case)
    before = {name: t.clone() for name, t in x.items()}
    compute(case, x)
    assert_equal(x, before)


@pytest.mark.parametrize("name", WITH_NAN)
def test_nan_stays_in_its_sequence(name: str, take_form: Callable[[str], None]) -> None:
    case = (CASES | FORMS)[name]
    take_form(case.form)
    case = case.forward if "delta" in name else case
    x, offsets = draw_packed(case, [100, 70, 130])
    expected = compute(case, x, offsets)
    values = (torch.nan, torch.inf) if case.is_mlstm else (torch.nan,)
    for poisoned, value in itertools.product((*OPERANDS, *case.gates), values):
        given = x | {poisoned: x[poisoned].clone()}
        given[poisoned][:, 100:170] = value
        found = compute(case, given, offsets)
        assert not torch.equal(found["o"][:, 100:170], expected["o"][:, 100:170])
        for result, t in expected.items():
            if is_of_states(result):
                assert torch.equal(found[result][::2], t[::2]), (poisoned, result)
                continue
            for rows in (slice(0, 100), slice(170, 300)):
                assert torch.equal(found[result][:, rows], t[:, rows]), (poisoned, result)


def test_shapes_alternate_in_one_process(new_calls: None, dtype: torch.dtype) -> None:
    calls = [(case, draw_batch(case, dtype=dtype)) for case in CASES.values()]
    first = [compute(case, x) for case, x in calls]
    for _ in range(2):
        for (case, x), expected in zip(calls, first, strict=True):
            assert_equal(compute(case, x), expected)


@pytest.mark.parametrize("name", COMPILED)
def test_torch_compile(name: str) -> None:
    """Forward and backward in one graph each, the same bits as without; of sequences that are not cut."""
    torch._dynamo.reset()
    x = draw(CASES[name], 2, 200)
    assert_equal(compute(CASES[name], x, compiled=True), compute(CASES[name], x))
