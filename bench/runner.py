"""One contest: every variant of an operator on one shape and pass, checked first, then timed side by side."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla_tk.build import BuildError
from tfla_tk.core.errors import UnsupportedError

from . import accuracy, fla, rivals, timing
from .accuracy import ORTHOGONAL, RANDOM, Truth
from .ceilings import Ceilings
from .inputs import DTYPES
from .operators import Operator, split_offsets
from .results import BASELINES, DEFAULTS, Row, rounded
from .shapes import Shape
from .variants import Variant

RECORD_REPEATS = 30
QUADRATIC_BYTES = 2**29
REFERENCE_SEQUENCES = 2048
OK, FAILED, UNSUPPORTED = "ok", "FAILED", "unsupported"


@dataclass(frozen=True)
class Settings:
    """What all contests of one run share.

    Attributes:
        layout, forget_bias: of the inputs, see `inputs.mlstm_inputs`.
        provenance: run, gpu, torch, triton, nvcc, commit and date of the rows.
        ceilings: None where there is no GPU.
    """

    device: torch.device
    dtype: str
    layout: str
    forget_bias: float
    seed: int
    plan: timing.Plan
    stopwatch: timing.Stopwatch
    provenance: Mapping[str, Any]
    ceilings: Ceilings | None = None


@dataclass
class Outcome:
    """What became of one variant: a row, or the reason why there is none.

    errors are against fp64; notes say what is to be known of them and of the variant.
    """

    op: str
    shape: Shape
    which: str
    variant: Variant
    status: str = OK
    reason: str = ""
    row: Row | None = None
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def stop(self, status: str, reason: str) -> None:
        """No row: it failed, or nothing serves the call."""
        self.status, self.reason = status, reason


def run_contest(
    operator: Operator,
    shape: Shape,
    which: str,
    variants: Sequence[Variant],
    settings: Settings,
    advance: Callable[[str], object] = lambda label: None,
) -> list[Outcome]:
    """Check each variant on this very shape, then time those that passed.

    Args:
        which: the pass, "fwd" or "fwdbwd".
        advance: called with a label after each step of the work; `steps_of` says how many there are.

    Returns:
        An outcome per variant, in their order. A variant that is wrong or raises is not timed.
    """
    with _lifted_guard(operator, variants, which, settings.device) as lifted:
        return _run(operator, shape, which, variants, settings, advance, [fla.NOTE] * lifted)


def _lifted_guard(
    operator: Operator, variants: Sequence[Variant], which: str, device: torch.device
) -> AbstractContextManager[bool]:
    """FLA's guard off where its backward takes part: every contest checks it before it is timed."""
    takes_part = which == "fwdbwd" and any(variant.call == fla.VARIANT for variant in variants)
    return fla.lifted_guard(operator.function) if takes_part and device.type == "cuda" else nullcontext(False)


def _run(
    operator: Operator,
    shape: Shape,
    which: str,
    variants: Sequence[Variant],
    settings: Settings,
    advance: Callable[[str], object],
    fla_notes: Sequence[str],
) -> list[Outcome]:
    """`run_contest`; fla_notes: what is to be said of FLA's figures."""
    outcomes = [Outcome(operator.name, shape, which, variant) for variant in variants]
    for outcome in outcomes:
        if outcome.variant.call == fla.VARIANT:
            outcome.notes += fla_notes
        if outcome.variant.call in rivals.RIVALS:
            outcome.notes += filter(None, [rivals.RIVALS[outcome.variant.call].note])
    kinds = list(dict.fromkeys(cotangent_kind(operator, variant, which) for variant in variants))
    try:
        inputs = operator.inputs(
            shape,
            DTYPES[settings.dtype],
            settings.device,
            settings.layout,
            settings.seed,
            settings.forget_bias,
        )
        truth = accuracy.compute_truth(operator, inputs, shape, which, kinds=kinds, seed=settings.seed + 1)
    except Exception as error:  # too large for this machine: the next contest may not be
        release(settings.device)
        for outcome in outcomes:
            outcome.stop(FAILED, f"inputs or fp64 reference: {verdict_on(error)[1]}")
        for label in ("fp64 reference", *2 * [variant.call for variant in variants]):
            advance(label)
        return outcomes
    release(settings.device)
    advance("fp64 reference")
    for outcome in outcomes:
        guard(outcome, partial(_check, operator, outcome, inputs, truth, settings))
        release(settings.device)
        advance(outcome.variant.call)
    cotangent = next(iter(truth.cotangents.values()), None)
    del truth
    _time(operator, outcomes, inputs, cotangent, settings, advance)
    return outcomes


def steps_of(variants: Sequence[Variant]) -> int:
    """How often `run_contest` calls `advance`: the reference, and per variant its check and its warm-up."""
    return 1 + 2 * len(variants)


def cotangent_kind(operator: Operator, variant: Variant, which: str) -> str:
    """The output gradient that a variant's gradients are checked with."""
    omits = operator.baseline_omits_normaliser and variant.family == "triton" and which == "fwdbwd"
    return ORTHOGONAL if omits else RANDOM


def make_step(
    operator: Operator, variant: Variant, inputs: Mapping[str, Tensor], cotangent: Tensor | None
) -> Callable[[], dict[str, Tensor]]:
    """One call of the pass: the output and, given its gradient, each input's; nothing accumulates.

    The results of a rival have its own names (`rivals.Rival.finish`).
    """
    differentiated, offsets = split_offsets(inputs)
    call: Callable[..., Tensor] = partial(operator.call, variant.call, **offsets)
    if variant.call in rivals.RIVALS:
        prepared = rivals.RIVALS[variant.call].prepare(inputs)
        differentiated, call = prepared.leaves, prepared.call
    if cotangent is None:
        tensors = list(differentiated.values())

        def forward() -> dict[str, Tensor]:
            with torch.no_grad():
                return {operator.output: call(*tensors)}

        return forward

    leaves = {name: tensor.detach().requires_grad_() for name, tensor in differentiated.items()}

    def forward_backward() -> dict[str, Tensor]:
        output = call(*leaves.values())
        grads = torch.autograd.grad(output, list(leaves.values()), cotangent)
        named = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
        return {operator.output: output.detach(), **named}

    return forward_backward


def _check(
    operator: Operator, outcome: Outcome, inputs: Mapping[str, Tensor], truth: Truth, settings: Settings
) -> None:
    """Fill the outcome's errors, and stop it where they exceed the tolerance."""
    refuse_quadratic(outcome)
    kind = cotangent_kind(operator, outcome.variant, outcome.which)
    step = make_step(operator, outcome.variant, inputs, truth.cotangents.get(kind))
    accuracy.poison(inputs["v"].numel() * inputs["v"].element_size(), settings.device)
    results = step()
    if outcome.variant.call in rivals.RIVALS:
        results = rivals.RIVALS[outcome.variant.call].finish(inputs, results)
    outcome.errors = truth.errors(kind, results)
    outcome.notes += [truth.picks.left_out] * truth.partial
    wrong = accuracy.failures(outcome.errors, _tolerances(operator, outcome.variant, settings.dtype))
    if wrong:
        outcome.stop(FAILED, "error against fp64: " + ", ".join(wrong))


def _tolerances(operator: Operator, variant: Variant, dtype: str) -> dict[str, float]:
    """By result."""
    return operator.tolerances(dtype, baseline=variant.family in BASELINES)


def refuse_quadratic(outcome: Outcome) -> None:
    """The parallel form has matrices [S, S]; long sequences would fill the memory.

    The reference loops over packed sequences; many would take minutes.
    """
    shape = outcome.shape
    if outcome.variant.family == "reference" and (shape.N or 0) > REFERENCE_SEQUENCES:
        raise UnsupportedError(outcome.variant.call, f"it computes {shape.N:,} sequences one after the other")
    # of packed sequences the matrices follow one another
    longest = max(shape.lengths())
    matrix = 4 * shape.B * shape.value_heads * longest**2
    if outcome.variant.call == "reference:parallel" and matrix > QUADRATIC_BYTES:
        raise UnsupportedError(
            "reference:parallel", f"one of its [S, S] matrices takes {matrix / 1e9:.0f} GB"
        )


def _time(
    operator: Operator,
    outcomes: Sequence[Outcome],
    inputs: Mapping[str, Tensor],
    cotangent: Tensor | None,
    settings: Settings,
    advance: Callable[[str], object],
) -> None:
    """Warm up, measure memory, time in rounds, and make the rows."""
    steps: dict[str, timing.Step] = {}
    repeats: dict[str, int] = {}
    memory: dict[str, int | None] = {}

    def prepare(outcome: Outcome) -> None:
        name = outcome.variant.call
        step = make_step(operator, outcome.variant, inputs, cotangent)
        estimate = timing.warm_up(step, settings.stopwatch, settings.plan.budget_ms)
        memory[name] = timing.peak_memory(step, settings.device)
        repeats[name] = settings.plan.repeats_for(estimate)
        steps[name] = step

    for outcome in outcomes:
        if outcome.status == OK:
            guard(outcome, partial(prepare, outcome))
        advance(outcome.variant.call)
    found = timing.interleave(steps, repeats, settings.stopwatch)
    for outcome in outcomes:
        name = outcome.variant.call
        if outcome.status == OK:
            host = _host_us(steps[name], found[name], settings)
            graph = _graph(steps[name], found[name], host, settings, always=operator.runs_in_graphs)
            outcome.row = make_row(operator, outcome, settings, found[name], memory[name], graph, host)


def _host_us(step: timing.Step, found: timing.Timing, settings: Settings) -> float | None:
    """Time of the host for one call; None on a CPU, which computes in it, and for a long call."""
    if settings.device.type != "cuda" or found.ms >= timing.HOST_BELOW_MS:
        return None
    return timing.host_us(step, settings.stopwatch.wait)


class GraphTimes(NamedTuple):
    """What the CUDA graph of a step tells: ms of a replay, its kernels, and the host's us to launch these."""

    ms: float
    launches: int | None = None
    launch_us: float | None = None


def _graph(
    step: timing.Step,
    found: timing.Timing,
    host_us: float | None,
    settings: Settings,
    *,
    always: bool = False,
) -> GraphTimes | None:
    """Times of CUDA-graph replays, for a step so short that its launches may dominate, or for every one.

    Short is one below GRAPH_BELOW_MS, or one whose time is mostly the host's. None where it cannot be
    captured.
    """
    waits_for_host = host_us is not None and host_us > 0.5e3 * found.ms
    wanted = always or found.ms < timing.GRAPH_BELOW_MS or waits_for_host
    if settings.device.type != "cuda" or not wanted:
        return None
    captured = timing.capture(step, settings.device)
    if captured is None:
        return None
    ms = timing.time_one(captured.replay, settings.plan.repeats, settings.stopwatch).ms
    if captured.launches is None:
        return GraphTimes(ms)
    return GraphTimes(ms, captured.launches, captured.launches * timing.launch_us(settings.stopwatch.wait))


def make_row(
    operator: Operator,
    outcome: Outcome,
    settings: Settings,
    found: timing.Timing,
    peak_bytes: int | None,
    graph: GraphTimes | None = None,
    host_us: float | None = None,
) -> Row:
    """The results row of a timed variant."""
    cost = operator.cost(outcome.shape, outcome.which, DTYPES[settings.dtype].itemsize)
    ceilings = settings.ceilings
    row: Row = {
        "op": operator.name,
        "shape": outcome.shape.as_dict(),
        "pass": outcome.which,
        "backend": outcome.variant.backend,
        "schedule": outcome.variant.schedule,
        "dtype": settings.dtype,
        "ms": rounded(found.ms),
        "ms_p20": rounded(found.p20),
        "ms_p80": rounded(found.p80),
        "tflops": rounded(cost.flops / found.ms / 1e9),
        "gbps": rounded(cost.bytes / found.ms / 1e6),
        "roofline": None if ceilings is None else rounded(ceilings.roofline_ms(cost) / found.ms, 3),
        "peak_mem_mb": None if peak_bytes is None else rounded(peak_bytes / 2**20),
        "rel_err": {name: rounded(error, 3) for name, error in outcome.errors.items()},
        **settings.provenance,
    }
    given = {"layout": settings.layout, "forget_bias": settings.forget_bias}
    row |= {key: value for key, value in given.items() if value != DEFAULTS[key]}
    if host_us is not None:
        row["host_us"] = rounded(host_us, 3)
    if graph is not None:
        row["graph_ms"] = rounded(graph.ms)
        if graph.launches is not None and graph.launch_us is not None:
            row |= {"launches": graph.launches, "launch_us": rounded(graph.launch_us, 3)}
    if found.repeats < RECORD_REPEATS:
        row["repeats"] = found.repeats
    notes = []
    if cotangent_kind(operator, outcome.variant, outcome.which) == ORTHOGONAL:
        notes.append("gradients without the normaliser's part, checked with dh orthogonal to h")
    notes += outcome.notes
    if notes:
        row["note"] = "; ".join(notes)
    return row


def guard(outcome: Outcome, work: Callable[[], object]) -> None:
    """Run one variant's work; whatever it raises is its outcome, and the others go on."""
    try:
        work()
    except Exception as error:
        outcome.stop(*verdict_on(error))


def verdict_on(error: Exception) -> tuple[str, str]:
    """Status and reason of a variant that raised: UNSUPPORTED or FAILED."""
    if isinstance(error, (UnsupportedError, BuildError)):  # a build's lines are the compiler's
        told = error.reason + (f" ({error.remedy})" if error.remedy else "")
        failed = isinstance(error, BuildError) or error.failed
        return (FAILED, f"BuildError: {told}") if failed else (UNSUPPORTED, told)
    text = str(error).strip().splitlines()
    return FAILED, f"{type(error).__name__}: {text[0] if text else 'no message'}"


def unserved(outcomes: Iterable[Outcome]) -> list[str]:
    """The variants that the user named which served no call, and the named families of which none did."""
    served: dict[str, bool] = {}
    for outcome in outcomes:
        variant = outcome.variant
        for name in [variant.call] * variant.named + [variant.family] * variant.family_named:
            served[name] = served.get(name, False) or outcome.status != UNSUPPORTED
    return [name for name, any_call in served.items() if not any_call]


def release(device: torch.device) -> None:
    """Give back what a check or a failed call left, so that it is in no variant's peak memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
