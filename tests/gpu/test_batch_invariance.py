"""batch_invariant on the GPU: the bits of a sequence alone, in a batch, and packed with others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import tfla_tk
from tfla_tk.core import memo

from .conftest import DEVICE
from .linear import Normal, Tensors, draw_operands

BACKEND, DTYPE = "tk", torch.bfloat16
HEADS = 2
STATES = ("c_initial", "n_initial", "m_initial", "initial_state")
OTHERS = (1111, 65)  # tokens of what is packed before and behind the sequences of a test


@dataclass(frozen=True)
class Case:
    """A function, its head dims, and the inputs beside q, k, v that it takes."""

    function: str
    dims: tuple[int, int]
    gates: tuple[str, ...] = ()
    states: tuple[str, ...] = ("initial_state",)
    trains: bool = True
    group: int = 1  # heads of v that share one of q and k
    flags: tuple[str, ...] = ()  # that make inputs of raw ones

    @property
    def is_mlstm(self) -> bool:
        return self.function.startswith("mlstm")

    @property
    def options(self) -> dict[str, Any]:
        """The flags, and the parameters of a gate that is made in the kernels, without gradients: these are
        sums over all sequences."""
        found: dict[str, Any] = dict.fromkeys(self.flags, True)
        if "use_gate_in_kernel" in self.flags:
            ends = {"A_log": (-1.0, 0.5), "dt_bias": (0.5, -2.0)}
            heads = HEADS * self.group
            found |= {name: torch.linspace(*of, heads, device=DEVICE) for name, of in ends.items()}
        return found


RAW = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "use_gate_in_kernel")
CASES = {
    "mlstm_exp": Case("mlstm_chunkwise", (128, 256), ("i", "f"), STATES[:3]),
    "mlstm_sig": Case("mlstm_siging_chunkwise", (128, 128), ("i", "f"), STATES[:2]),
    "mlstm_exp_parts": Case("mlstm_chunkwise", (64, 512), ("i", "f"), STATES[:3]),
    "simple_gla": Case("chunk_simple_gla", (128, 128), ("g",)),
    "retention": Case("chunk_retention", (128, 256)),
    "delta": Case("chunk_delta_rule", (128, 128), ("beta",)),
    "delta_raw": Case("chunk_delta_rule", (64, 64), ("beta",), flags=RAW[:1]),
    "gated_delta_64": Case("chunk_gated_delta_rule", (64, 64), ("g", "beta")),
    "gated_delta_raw": Case("chunk_gated_delta_rule", (128, 128), ("g", "beta"), group=2, flags=RAW),
    "gated_delta_128": Case("chunk_gated_delta_rule", (128, 128), ("g", "beta")),
    "gated_delta_256": Case("chunk_gated_delta_rule", (128, 256), ("g", "beta")),
    "gated_delta_wide": Case("chunk_gated_delta_rule", (192, 320), ("g", "beta")),
    "simple_gla_grouped": Case("chunk_simple_gla", (64, 64), ("g",), group=3),
    "gated_delta_grouped": Case("chunk_gated_delta_rule", (128, 256), ("g", "beta"), group=2),
    "gla": Case("chunk_gla", (128, 128), ("g",)),
    "gla_64": Case("chunk_gla", (64, 256), ("g",)),
    "gla_wide": Case("chunk_gla", (192, 320), ("g",)),
}


@pytest.fixture(autouse=True)
def on() -> Iterator[None]:
    with tfla_tk.batch_invariant():
        yield


def draw(case: Case, batch: int, seq: int, seed: int) -> Tensors:
    """Inputs [B, T, H, D] and [B, H, ..], and do and dlast, the gradients of the outputs."""
    normal, heads, (dim_k, dim_v) = Normal(seed), HEADS * case.group, case.dims
    unit = "delta_rule" in case.function and not case.flags
    x = draw_operands(normal, batch, seq, HEADS, heads, case.dims, DTYPE, unit=unit)
    for name in case.gates:
        shape = (batch, seq, heads, dim_k) if case.function == "chunk_gla" else (batch, seq, heads)
        gate = normal(*shape)
        made = {"i": gate, "f": gate + 3, "g": logsigmoid(gate + 3), "beta": torch.sigmoid(gate)}
        x[name] = gate if case.flags == RAW else made[name]
    for name in case.states:
        shape = {"n_initial": (dim_k,), "m_initial": (1,)}.get(name, case.dims)
        x[name] = normal(batch, heads, *shape)
    x["do"] = normal(batch, seq, heads, dim_v).to(DTYPE)
    x["dlast"] = normal(batch, heads, dim_k, dim_v)
    return x


def compute(case: Case, x: Tensors, offsets: Tensor | None = None) -> Tensors:
    """Outputs and gradients by name, like x: [B, T, ..] of tokens, [N, ..] of states."""
    given, x = (x["do"], x["dlast"]), {name: t for name, t in x.items() if name not in ("do", "dlast")}
    leaves = {name: t.detach().requires_grad_(case.trains and name != "m_initial") for name, t in x.items()}
    inputs = {
        name: t.transpose(1, 2) if case.is_mlstm and name not in STATES else t for name, t in leaves.items()
    }
    options: dict[str, Any] = {"cu_seqlens": offsets, "backend": BACKEND, **case.options}
    function = getattr(tfla_tk, case.function)
    if case.is_mlstm:
        h, last = function(**inputs, **options, return_last_states=True)
        outputs = {"o": h.transpose(1, 2), **dict(zip(("last", "n", "m"), last, strict=False))}
    else:
        o, last = function(**inputs, **options, output_final_state=True)
        outputs = {"o": o, "last": last}
    found = {name: t.detach() for name, t in outputs.items()}
    if case.trains:
        names = [name for name, t in leaves.items() if t.requires_grad]
        grads = torch.autograd.grad(
            [outputs["o"], outputs["last"]], [leaves[name] for name in names], list(given)
        )
        found |= {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
    return found


def is_of_states(name: str) -> bool:
    return name in ("last", "n", "m", "dlast") or name.removeprefix("d") in STATES


def sequence_of(x: Tensors, number: int, tokens: slice | None = None) -> Tensors:
    """One sequence, as a batch of one; of packed ones by its tokens."""
    return {
        name: t[number : number + 1] if is_of_states(name) or tokens is None else t[:, tokens]
        for name, t in x.items()
    }


def pack(parts: list[Tensors]) -> tuple[Tensors, Tensor]:
    """Batches one behind the other in one batch of one, and the offsets."""
    lengths = [part["q"].shape[1] for part in parts for _ in range(part["q"].shape[0])]
    x = {
        name: torch.cat([part[name] if is_of_states(name) else part[name].flatten(0, 1) for part in parts])
        for name in parts[0]
    }
    x = {name: t if is_of_states(name) else t[None] for name, t in x.items()}
    return x, torch.tensor([0, *lengths], device=DEVICE).cumsum(0)


def assert_same(found: Tensors, expected: Tensors, where: str) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, t in expected.items() if not torch.equal(found[name], t)]
    assert not different, f"{where}: {different}"


def check(case: Case, batch: int, seq: int) -> None:
    """The first, a middle and the last sequence of a batch, alone and in every call."""
    x = draw(case, batch, seq, 0)
    numbers = sorted({0, batch // 2, batch - 1})
    alone = {number: compute(case, sequence_of(x, number)) for number in numbers}
    together = compute(case, x)
    for number in numbers:
        assert_same(sequence_of(together, number), alone[number], f"sequence {number} of a batch")
    before, behind = (draw(case, 1, tokens, seed) for seed, tokens in enumerate(OTHERS, 1))
    for parts, first in (([x], 0), ([before, x, behind], 1)):
        packed, offsets = pack(parts)
        found = compute(case, packed, offsets)
        start = OTHERS[0] * first
        for number in numbers:
            tokens = slice(start + number * seq, start + (number + 1) * seq)
            mine = sequence_of(found, first + number, tokens)
            assert_same(mine, alone[number], f"sequence {number}, packed at token {start}")


@pytest.mark.parametrize("batch", [1, 3, 40])
@pytest.mark.parametrize("seq", [1, 63, 1000, 5000])
@pytest.mark.parametrize("case", CASES)
def test_bits(case: str, seq: int, batch: int) -> None:
    check(CASES[case], batch, seq)


@pytest.mark.parametrize(
    "case", ["mlstm_exp", "simple_gla", "delta", "gated_delta_256", "gated_delta_raw", "gla"]
)
def test_bits_of_the_ops(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which keep no states for their backward."""
    monkeypatch.setattr(memo, "KNOWS_EAGER_CALLS", False)
    check(CASES[case], 3, 5000)


@pytest.mark.parametrize("case", CASES)
def test_one_token_of_one_head(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over parts have one number each then."""
    monkeypatch.setattr(sys.modules[__name__], "HEADS", 1)
    check(CASES[case], 3, 1)


@pytest.mark.parametrize(
    "case", ["mlstm_exp", "mlstm_sig", "simple_gla", "delta", "gated_delta_256", "gated_delta_raw", "gla"]
)
def test_inference_has_the_bits_of_training(case: str) -> None:
    x = draw(CASES[case], 2, 5000, 0)
    trained = compute(CASES[case], x)
    without = compute(Case(**{**vars(CASES[case]), "trains": False}), x)
    assert_same(without, {name: trained[name] for name in without}, "inference")


@pytest.mark.parametrize(
    "case", ["mlstm_exp", "simple_gla", "delta", "gated_delta_128", "gated_delta_raw", "gla"]
)
def test_a_graph_keeps_what_was_on_at_its_capture(case: str) -> None:
    x, of_case = draw(CASES[case], 1, 5000, 0), CASES[case]
    expected = compute(of_case, x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compute(of_case, x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = compute(of_case, x)
    with tfla_tk.batch_invariant(False):
        graph.replay()
    torch.cuda.synchronize()
    assert_same(found, expected, "replay")


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [None, 1, 5, 16])
@pytest.mark.parametrize("dims", [(128, 256), (256, 512), (64, 64)], ids="{0[0]}_{0[1]}".format)
def test_decoding(dims: tuple[int, int], tokens: int | None, state: torch.dtype) -> None:
    """One token (None), or a few."""
    normal, rows = Normal(0), () if tokens is None else (tokens,)
    function: Callable[..., Any] = tfla_tk.mlstm_step if tokens is None else tfla_tk.mlstm_sequence
    dim_k, dim_v = dims
    shapes = {
        "q": (*rows, dim_k),
        "k": (*rows, dim_k),
        "v": (*rows, dim_v),
        "i": rows or (1,),
        "f": rows or (1,),
    }
    x = {name: normal(40, HEADS, *shape) for name, shape in shapes.items()}
    x = {name: t.to(DTYPE) if name in "qkv" else t for name, t in x.items()}
    for name, shape in (("c", dims), ("n", (dim_k,)), ("m", (1,))):
        x[name] = normal(40, HEADS, *shape).to(state)

    def run(first: int, count: int) -> Tensors:
        own = {name: t[first : first + count] for name, t in x.items()}
        h, last = function(**own, dtype_state=state, backend=BACKEND)
        return {"h": h, **dict(zip("cnm", last, strict=True))}

    whole = run(0, 40)
    for first, count in ((0, 1), (7, 1), (39, 1), (5, 3)):
        expected = {name: t[first : first + count] for name, t in whole.items()}
        assert_same(run(first, count), expected, f"{count} from {first} on")
