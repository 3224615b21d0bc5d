"""Fixtures of the GPU tests: operators, dtypes, and the kernels' forms that calls are forced into."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tfla_tk import delta_rule, gla, kda, mlstm, simple_gla
from tfla_tk.backends.tk import channel_gate, segments
from tfla_tk.backends.tk import kda as tk_kda
from tfla_tk.backends.tk.delta_rule import launch as delta_launch
from tfla_tk.backends.tk.delta_rule.call import Shape as DeltaShape
from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward
from tfla_tk.bench import fla
from tfla_tk.core import eager
from tfla_tk.core.layout import SEGMENT_CHUNKS

from .accuracy import TOLERANCE
from .mlstm import OPERATORS, Operator

KEPT_BYTES = 2**30  # of memory of the GPU that a process may keep between tests


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """PyTorch keeps little of what a test has freed: other processes of the run share the GPU."""
    yield
    if torch.cuda.memory_reserved() > KEPT_BYTES:
        gc.collect()  # exceptions hold tensors
        torch.cuda.empty_cache()


@pytest.fixture(params=OPERATORS)
def operator(request: pytest.FixtureRequest) -> Operator:
    """mLSTM with exponential gate, with sigmoid gate, and without normaliser."""
    return OPERATORS[request.param]


@pytest.fixture
def exponential() -> Operator:
    """mLSTM with exponential gate."""
    return OPERATORS["exp"]


@pytest.fixture(params=list(TOLERANCE), ids=["bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The operands' dtypes."""
    return request.param


@pytest.fixture(params=["plain", "op"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain call, whose dq begins with the states that the forward left, and the op, which makes them."""
    if request.param == "op":
        monkeypatch.setattr(eager, "KNOWS_EAGER_CALLS", False)


@pytest.fixture
def hardly_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autotuned Triton kernels choose between two configurations: tuning outlasts a test's limit."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    prune = autotuner.prune_configs
    monkeypatch.setattr(autotuner, "prune_configs", lambda self, kwargs: prune(self, kwargs)[:2])


@pytest.fixture
def fla_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLA calls no kernels of other packages, where it has been imported with its dispatch to them on."""
    for switch in fla.SWITCHES:
        monkeypatch.setenv(switch, "0")


def forget_calls() -> None:
    """Have the next calls worked out anew, whatever calls like them there were."""
    for path in (
        mlstm._chunkwise,
        simple_gla._path,
        gla._path,
        delta_rule._path,
        kda._path,
    ):
        path.plans.clear()
    for launches in (tk_forward, channel_gate, delta_launch, tk_kda):
        launches._forwards.clear()
    for launches in (tk_backward, channel_gate, delta_launch, tk_kda):
        launches._backwards.clear()


@pytest.fixture
def new_calls() -> Iterator[None]:
    """No call of the test is like one before or after it."""
    forget_calls()
    yield
    forget_calls()


@pytest.fixture
def cut_every(monkeypatch: pytest.MonkeyPatch, new_calls: None) -> Callable[[int], None]:
    """Cuts every sequence into segments of so many chunks, forward and backward; 0: as its sizes ask for."""

    def cut_every(chunks: int) -> None:
        if not chunks:
            return

        def cut(sequences: int, tokens: int, *_: int) -> segments.Cut:
            return segments.Cut(sequences * -(-tokens // (chunks * segments.CHUNK)), chunks)

        def cut_packed(sequences: int, tokens: int, *_: int) -> segments.Cut:
            return segments.Cut(sequences + tokens // (chunks * segments.CHUNK), chunks)

        monkeypatch.setattr(segments, "cut", cut)
        monkeypatch.setattr(segments, "cut_packed", cut_packed)
        forget_calls()

    return cut_every


# Forms of the delta rule's launches, by what they set of a call's sizes. The chunk matrices are made by the
# forward's walk, by CTAs beside it or by a launch before it. A split walks the segments of a sequence at
# once, each from a lead before it, or carries states from one to the next.
_WHOLE = {"split": None}
_TWO_WALKERS = {"makers": 0, "walkers": 2, "forward_walkers": 2, **_WHOLE}
_SPLIT = {"split": property(lambda shape: shape.cut_into(SEGMENT_CHUNKS))}
DELTA_FORMS: dict[str, dict[str, Any]] = {
    "in walk": {"walk_makes_matrices": True, **_TWO_WALKERS},
    "before two walkers": {"walk_makes_matrices": False, **_TWO_WALKERS},
    "before": {"makers": 0},
    "whole": _WHOLE,
    "leads": {"longest_lead": SEGMENT_CHUNKS, **_SPLIT},
    "carried": {"longest_lead": 0, **_SPLIT},
}


@pytest.fixture
def take_form(
    monkeypatch: pytest.MonkeyPatch, new_calls: None, cut_every: Callable[[int], None]
) -> Callable[[str], None]:
    """Has calls take one of DELTA_FORMS, or "cut": segments of two chunks; "": what their sizes ask for."""
    rule = {name: DeltaShape.__dict__[name] for form in DELTA_FORMS.values() for name in form}

    def take_form(form: str) -> None:
        if form == "cut":
            cut_every(2)
            return
        for name, value in (rule | DELTA_FORMS.get(form, {})).items():
            monkeypatch.setattr(DeltaShape, name, value)
        forget_calls()

    return take_form
