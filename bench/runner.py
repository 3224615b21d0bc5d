"""One contest: every variant of an operator on one shape and pass, checked first, then timed side by side."""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tfla_tk.build import BuildError
from tfla_tk.core.errors import UnsupportedError

from . import accuracy, fla, results, rivals, timing
from .accuracy import AS_GIVEN, ORTHOGONAL, RANDOM, Truth
from .inputs import DTYPES, Named, cotangent_like
from .operators import Operator, parts_of, split_offsets
from .results import BASELINES, DEFAULTS, Row
from .shapes import Shape, cost
from .timing import Timing
from .variants import Variant

QUADRATIC_BYTES = 2**29
REFERENCE_SEQUENCES = 2048
OK, FAILED, UNSUPPORTED = "ok", "FAILED", "unsupported"


@dataclass(frozen=True)
class Settings:
    """What all contests of one run share. layout, forget_bias: of the inputs, see `inputs.mlstm_inputs`.
    provenance: run, gpu, torch, triton, nvcc, commit and date of the rows. ceilings: None where there is
    no GPU."""

    device: torch.device
    dtype: str
    layout: str
    forget_bias: float
    seed: int
    plan: timing.Plan
    stopwatch: timing.Stopwatch
    provenance: Mapping[str, Any]
    ceilings: timing.Ceilings | None = None


class Contest(NamedTuple):
    """The variants of an operator on one shape and pass."""

    operator: Operator
    which: str
    shape: Shape
    variants: Sequence[Variant]


@dataclass(kw_only=True)
class Verdict:
    """What became of something that was tried: its errors, by name, and the reason where it failed or
    nothing serves it."""

    raised: ClassVar[tuple[type[Exception], ...]] = ()  # what is no fault of the work alone
    status: str = OK
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)

    def run(self, work: Callable[[], Any]) -> Any:
        """What the work gives; None where it raises, which is the verdict then, and others go on."""
        try:
            return work()
        except self.raised:
            raise
        except Exception as error:
            self.status, self.reason = verdict_on(error)
            return None


@dataclass
class Outcome(Verdict):
    """What became of one variant. row: None where it was not timed. errors: against fp64, of a part of the
    call where `partial`. notes: what is to be known of them and of the variant."""

    variant: Variant
    row: Row | None = None
    partial: bool = False
    notes: list[str] = field(default_factory=list)


def run_contest(
    contest: Contest, settings: Settings, tell: Callable[[str], object] = lambda label: None
) -> list[Outcome]:
    """Check each variant on this very shape, then time those that passed: an outcome per variant, in their
    order. tell is called with a label before each step of the work."""
    operator, which, _, variants = contest
    outcomes = [Outcome(variant) for variant in variants]
    with lifted_guard(operator, variants, which, settings.device) as lifted:
        of = {fla.VARIANT: fla.NOTE * lifted, **{name: each.note for name, each in rivals.RIVALS.items()}}
        for outcome in outcomes:
            outcome.notes += filter(None, [of.get(outcome.variant.call)])
        _check_and_time(contest, outcomes, settings, tell)
    return outcomes


def lifted_guard(
    operator: Operator, variants: Sequence[Variant], which: str, device: torch.device
) -> AbstractContextManager[bool]:
    """FLA's guard off where its backward takes part: every contest checks it before it is timed."""
    takes_part = which == "fwdbwd" and any(variant.call == fla.VARIANT for variant in variants)
    return fla.lifted_guard(operator.function) if takes_part and device.type == "cuda" else nullcontext(False)


def _check_and_time(
    contest: Contest, outcomes: Sequence[Outcome], settings: Settings, tell: Callable[[str], object]
) -> None:
    """Fill the outcomes of one contest."""
    tell("fp64 reference")
    operator, which, shape, variants = contest
    kinds = [cotangent_kind(operator, variant, which) for variant in variants]
    dtype, device, seed = DTYPES[settings.dtype], settings.device, settings.seed
    try:
        inputs = operator.inputs(shape, dtype, device, settings.layout, seed, settings.forget_bias)
        drawn = {operator.output: cotangent_like(inputs["v"], seed + 1)} if which == "fwdbwd" else {}
        truths = {kind: accuracy.compute_truth(operator, shape, inputs, drawn, kind) for kind in set(kinds)}
    except Exception as error:  # too large for this machine: the next contest may not be
        for outcome in outcomes:
            outcome.status, outcome.reason = FAILED, f"inputs or fp64 reference: {verdict_on(error)[1]}"
        return
    finally:
        release(device)
    for outcome, kind in zip(outcomes, kinds, strict=True):
        tell(outcome.variant.call)
        limits = operator.tolerances(settings.dtype, baseline=outcome.variant.family in BASELINES)
        work = partial(check, outcome, inputs, truths[kind], limits)
        outcome.run(work)
        release(device)
    del truths, work  # gigabytes that nothing timed needs
    tell("timed")
    _time(contest, outcomes, inputs, drawn, settings)


def cotangent_kind(operator: Operator, variant: Variant, which: str) -> str:
    """The output gradient that a variant's gradients are checked with."""
    omits = operator.baseline_omits_normaliser and variant.family == "triton" and which == "fwdbwd"
    return ORTHOGONAL if omits else RANDOM


def make_step(
    operator: Operator, variant: Variant, inputs: Named, cotangents: Named, *, unused: bool = False
) -> Callable[[], dict[str, Tensor]]:
    """One call of the pass: the output and the gradient "d<name>" of each input; nothing accumulates. The
    results of a rival have its own names (`rivals.Rival.finish`). cotangents: of the output and, named as
    the initial states are, of the last ones; empty for the output alone. unused: an input that the output
    does not depend on has a gradient of zeros."""
    tensors, offsets = split_offsets(inputs)
    call: Callable[..., Any] = partial(operator.call, variant.call, **offsets)
    if variant.call in rivals.RIVALS:
        tensors, call = rivals.prepare(variant.call, inputs)
    backward = bool(cotangents)
    leaves = {
        name: tensor.detach().requires_grad_(backward and name not in operator.constants)
        for name, tensor in tensors.items()
    }
    named: dict[str, Any] = {
        name: leaf for name, leaf in leaves.items() if operator.is_state(name) or operator.is_parameter(name)
    }
    call = partial(call, *(leaf for name, leaf in leaves.items() if name not in named), **named)
    if len(cotangents) > 1:
        call = partial(call, **{operator.last: True})

    def forward() -> dict[str, Tensor]:
        with torch.no_grad():
            return {operator.output: parts_of(call())[0]}

    wanted = {f"d{name}": leaf for name, leaf in leaves.items() if leaf.requires_grad}
    sources, given = list(wanted.values()), list(cotangents.values())

    def forward_backward() -> dict[str, Tensor]:
        found = parts_of(call())[: len(given)]
        grads = torch.autograd.grad(found, sources, given, allow_unused=unused, materialize_grads=unused)
        return {operator.output: found[0].detach(), **dict(zip(wanted, grads, strict=True))}

    return forward_backward if backward else forward


def check(outcome: Outcome, inputs: Named, truth: Truth, tolerances: dict[str, float]) -> None:
    """Fill the outcome's errors, and stop it where they exceed the tolerances."""
    refuse_quadratic(outcome.variant, truth.picks.shape)
    v, rival = inputs["v"], rivals.RIVALS.get(outcome.variant.call)
    unused = truth.kind == AS_GIVEN
    step = make_step(truth.picks.operator, outcome.variant, inputs, truth.cotangents, unused=unused)
    if v.is_cuda:  # leaves NaN in the allocator's free memory: an element that a kernel does not write shows
        torch.full((v.numel() * v.element_size() // 4 + 1,), float("nan"), device=v.device)
    results = step()
    outcome.errors = truth.errors(rival.finish(inputs, results) if rival else results)
    outcome.partial = bool(truth.picks.left_out)
    outcome.notes += filter(None, [truth.picks.left_out])
    wrong = accuracy.failures(outcome.errors, tolerances)
    if wrong:
        outcome.status, outcome.reason = FAILED, "error against fp64: " + ", ".join(wrong)


def refuse_quadratic(variant: Variant, shape: Shape) -> None:
    """The parallel form has matrices [S, S]; long sequences would fill the memory. The reference loops
    over packed sequences; many would take minutes."""
    if variant.family == "reference" and (shape.N or 0) > REFERENCE_SEQUENCES:
        raise UnsupportedError(variant.call, f"it computes {shape.N:,} sequences one after the other")
    # of packed sequences the matrices follow one another
    matrix = 4 * shape.B * shape.value_heads * max(shape.lengths()) ** 2
    if variant.call == "reference:parallel" and matrix > QUADRATIC_BYTES:
        raise UnsupportedError(variant.call, f"one of its [S, S] matrices takes {matrix / 1e9:.0f} GB")


def _time(
    contest: Contest, outcomes: Sequence[Outcome], inputs: Named, cotangents: Named, settings: Settings
) -> None:
    """Warm up, measure memory, time in rounds, and make the rows."""
    steps: dict[str, timing.Step] = {}
    repeats: dict[str, int] = {}
    memory: dict[str, int | None] = {}

    def prepare(variant: Variant) -> None:
        step = make_step(contest.operator, variant, inputs, cotangents)
        estimate = timing.warm_up(step, settings.stopwatch, settings.plan.budget_ms)
        memory[variant.call] = timing.peak_memory(step, settings.device)
        repeats[variant.call] = settings.plan.repeats_for(estimate)
        steps[variant.call] = step

    for outcome in outcomes:
        if outcome.status == OK:
            outcome.run(partial(prepare, outcome.variant))
    found = timing.interleave(steps, repeats, settings.stopwatch)
    for outcome in outcomes:
        name = outcome.variant.call
        if outcome.status == OK:
            always = contest.operator.runs_in_graphs
            more = _other_times(steps[name], found[name].ms, settings, always_graph=always)
            outcome.row = make_row(contest, outcome, settings, found[name], memory[name], **more)


def _other_times(step: timing.Step, ms: float, settings: Settings, *, always_graph: bool) -> dict[str, float]:
    """What else a row tells of a step on a GPU, by the row's keys. The host's time for one call, unless it
    is a long one. The time of CUDA-graph replays, the graph's kernels and the host's time to launch as
    many empty ones: for a step so short that its launches may dominate (below GRAPH_BELOW_MS, or mostly
    the host's time), with `always_graph` for every step."""
    more: dict[str, float] = {}
    if settings.device.type != "cuda":
        return more
    wait = settings.stopwatch.wait
    if ms < timing.HOST_BELOW_MS:
        more["host_us"] = timing.host_us(step, wait)
    if not (always_graph or ms < timing.GRAPH_BELOW_MS or more.get("host_us", 0) > 0.5e3 * ms):
        return more
    captured = timing.capture(step, settings.device)
    if captured is not None:
        replayed = timing.time_one(captured.replay, settings.plan.repeats, settings.stopwatch)
        more["graph_ms"] = replayed.ms
        if captured.launches is not None:
            more["launches"] = captured.launches
            more["launch_us"] = captured.launches * timing.launch_us(wait)
    return more


def make_row(
    contest: Contest, outcome: Outcome, settings: Settings, found: Timing, peak: int | None, **more: Any
) -> Row:
    """The results row of a timed variant. peak: its memory in bytes. more: by the row's keys."""
    operator, which, shape, _ = contest
    least = cost(operator.name, shape, which, DTYPES[settings.dtype].itemsize)
    if settings.ceilings is not None:
        more["roofline"] = settings.ceilings.roofline_ms(least) / found.ms
    given = {"layout": settings.layout, "forget_bias": settings.forget_bias}
    more |= {key: value for key, value in given.items() if value != DEFAULTS[key]}
    more |= {"tflops": least.flops / found.ms / 1e9, "gbps": least.bytes / found.ms / 1e6}
    more |= {"peak_mem_mb": None if peak is None else peak / 2**20, "rel_err": outcome.errors}
    orthogonal = cotangent_kind(operator, outcome.variant, which) == ORTHOGONAL
    omits = ["gradients without the normaliser's part, checked with dh orthogonal to h"] * orthogonal
    more |= {"note": "; ".join([*omits, *outcome.notes]), **settings.provenance}
    backend, more["schedule"] = outcome.variant.backend, outcome.variant.schedule
    return results.new_row(operator.name, shape, which, backend, settings.dtype, found, **more)


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
