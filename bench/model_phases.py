"""The phases of `python -m tfla_tk.bench model`: the models, the kernels they call, their times and errors.

The phases run xlstm's xLSTMLarge on several kernels in turn: the same weights and inputs, rounds in which
each of them has one run.
"""

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tfla_tk.integrations import xlstm
from tfla_tk.integrations.xlstm import modules

from .results import FP32_NATIVE, MODEL, Row, new_row, rounded
from .runner import FAILED, OK, Verdict, release
from .shapes import ModelShape
from .text import make_text, windows
from .timing import CudaStopwatch, Stopwatch, Timing, capture, time_one

CPU = torch.device("cpu")
AGREEMENT = "agreement"
TRUTH, NOISE = FP32_NATIVE, "reference"  # of the agreement; the noise is that of the reference in bf16
INPUT_BIAS, FORGET_BIASES = -3.0, (3.0, 6.0)
# chunkwise kernel, chunk size and step kernel; the step does not depend on the chunks
BASELINES = {"native": ("chunkwise--native_autograd", 64, "native")}
# the fastest correct one on record, and the step beside it
TRITON, STEP = "triton:xl_chunk_128", "triton:step"
BASELINES |= dict.fromkeys((TRITON, STEP), ("chunkwise--triton_xl_chunk", 128, "triton"))

LOSS_TOKENS = 1024  # of a sequence whose logits are in memory at a time, while training
TEXT_BYTES = 2**20
WARM_UP_RATE = 10  # steps
GRADIENT_NORM = 1.0  # that gradients are clipped to
# the mLSTM kernels of this package and of mlstm_kernels; the latter compiles gate arithmetic by inductor
KERNELS = ("mlstm", "recurrent_step_fw_kernel")
INDUCTOR = "triton_"


class Losses(NamedTuple):
    """The trainings whose losses are compared: layers, batch, tokens of a sequence, steps, learning rate."""

    layers: int
    batch: int
    length: int
    steps: int
    rate: float


@dataclass(frozen=True)
class Task:
    """What a phase does.

    Attributes:
        phase: "train", "prefill", "decode" or AGREEMENT.
        width, heads, vocabulary, layers: of the model; q and k have half the head's width.
        batches: one measurement for each. length: tokens of a sequence; for AGREEMENT, of the prompt.
        repeats: timed runs. tokens: decoded one by one for AGREEMENT. losses: for AGREEMENT alone.
        variants: a backend of tfla_tk ("tk"), or a key of BASELINES: mlstm_kernels as its users run it.
    """

    phase: str
    width: int
    heads: int
    vocabulary: int
    layers: int
    batches: tuple[int, ...]
    length: int
    repeats: int = 1
    tokens: int = 16
    losses: Losses | None = None
    variants: tuple[str, ...] = ()
    device: torch.device = CPU
    seed: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def kept_dtype(self) -> torch.dtype:
        """Of the weights for inference; states are fp32."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def shape(self, batch: int) -> ModelShape:
        """The shape of the rows with a batch."""
        dim_v = self.width // self.heads
        return ModelShape(batch, self.length, self.heads, dim_v // 2, dim_v, self.layers, self.width)

    def random_tokens(self, batch: int, length: int) -> Tensor:
        """[batch, length] int64 on the device, from the seed."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(self.vocabulary, (batch, length), generator=generator).to(self.device)


@dataclass
class Outcome(Verdict):
    """What became of a variant in a phase. rows: by batch, without what all rows of a run share. errors: of
    the agreement, by the phase that they are of."""

    raised = torch.OutOfMemoryError, torch.AcceleratorError  # a GPU that has failed
    variant: str
    rows: dict[int, Row] = field(default_factory=dict)


def perform(task: Task) -> tuple[Task, list[Outcome]]:
    """Do a task at the largest batch that fits: the task as it was done at last, and the outcomes of its
    variants."""
    while True:
        try:
            return task, agreement(task) if task.phase == AGREEMENT else measure(task)
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
        finally:
            release(task.device)
        if task.batches[-1] == 1:
            return task, [Outcome(variant, status=FAILED, reason=reason) for variant in task.variants]
        task = replace(task, batches=tuple(max(1, batch // 2) for batch in task.batches))


# The model


def build(task: Task, mode: str, dtype: torch.dtype) -> Any:
    """An xLSTMLarge with weights from the seed, on the task's device. Its gates start between short and
    long memory, and from an input bias at which losses of the first steps repeat within rounding."""
    large = importlib.import_module("xlstm.xlstm_large.model")
    config = large.xLSTMLargeConfig(
        embedding_dim=task.width,
        num_heads=task.heads,
        num_blocks=task.layers,
        vocab_size=task.vocabulary,
        mode=mode,
        return_last_states=True,  # without it xLSTMLarge cannot unpack what its layers return
        **dict(zip(("chunkwise_kernel", "chunk_size", "step_kernel"), BASELINES["native"], strict=True)),
        sequence_kernel="native_sequence__native",
    )
    torch.manual_seed(task.seed)
    with task.device:
        model = large.xLSTMLarge(config)
    for block in model.backbone.blocks:
        layer = block.mlstm_layer
        for gate in (layer.igate_preact, layer.fgate_preact):
            nn.init.normal_(gate.weight, 0.0, 0.02)
        nn.init.constant_(layer.igate_preact.bias, INPUT_BIAS)
        layer.fgate_preact.bias.data.copy_(torch.linspace(*FORGET_BIASES, task.heads))
    return model.to(dtype)


# activation checkpointing; there is no dropout
recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def use(model: nn.Module, variant: str) -> None:
    """Have the model's mLSTM layers call a variant."""
    layers = modules.backends_of(model).values()
    for layer in layers:
        config: Any = layer.config
        kernels = BASELINES.get(variant, BASELINES["native"])
        config.chunkwise_kernel, config.chunk_size, config.step_kernel = kernels
    if variant not in BASELINES:
        xlstm.replace(model, backend=variant)
        return
    xlstm.restore(model)
    if variant == TRITON:  # Triton 3.6 aborts the process when it compiles the kernel over 16-bit gates
        for layer in layers:
            *others, train, inference = modules.functions(layer)
            passes = map(_with_fp32_gates, (train, inference))
            modules.set_functions(layer, (*others, *passes))


def _with_fp32_gates(function: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's pass over gates cast to fp32, without autocast, which would cast them back."""

    def call(*, q: Tensor, i: Tensor, f: Tensor, **rest: Any) -> Any:
        with torch.autocast(q.device.type, enabled=False):
            return function(q=q, i=i.float(), f=f.float(), **rest)

    return call


# Figures


def measure(task: Task) -> list[Outcome]:
    """Warm the variants up and time them in rounds, batch by batch; the profiler, which slows launches,
    last. A variant that raises is out, the others go on."""
    model, make_step = prepare(task)
    # long steps without an untimed run and without a flush of the L2 cache before
    by_events = task.phase == "decode" and task.on_gpu
    stopwatch = (CudaStopwatch if by_events else Stopwatch)(task.device)
    outcomes = [Outcome(variant) for variant in task.variants]

    def run(outcome: Outcome, work: Callable[[], Any]) -> Any:
        def attempt() -> Any:
            use(model, outcome.variant)
            return work()

        return outcome.run(attempt) if outcome.status == OK else None

    def add(batch: int, key: str, work: Callable[[], float | None]) -> None:
        for outcome in outcomes:
            figure = run(outcome, work)
            if figure is not None:
                outcome.rows[batch][key] = rounded(key, figure)

    for batch in task.batches:
        step = make_step(batch)
        for outcome in outcomes:
            run(outcome, step)
            if outcome.status != OK:
                release(task.device)
        singles: dict[str, list[Any]] = {outcome.variant: [] for outcome in outcomes}
        for _ in range(task.repeats):
            for outcome in outcomes:
                singles[outcome.variant].append(run(outcome, partial(_single_run, task, step, stopwatch)))
        for outcome in outcomes:
            if outcome.status == OK:
                times, memory = zip(*singles[outcome.variant], strict=True)
                found = Timing.of(list(times))
                figures: Row = {"rel_err": {}, "peak_mem_mb": max(memory) if task.on_gpu else None}
                dtype = "bf16" if task.on_gpu else "fp32"
                row = new_row(MODEL, task.shape(batch), task.phase, outcome.variant, dtype, found, **figures)
                outcome.rows[batch] = row
        if by_events:
            add(batch, "graph_ms", partial(_graph_ms, task, step, stopwatch))
    for batch in task.batches if task.on_gpu else ():
        add(batch, "kernel_share", partial(_kernel_share, make_step(batch), task.device))
    return outcomes


def _single_run(task: Task, step: Callable[[], object], stopwatch: Stopwatch) -> tuple[float, float]:
    """ms, and all that was allocated at the peak in 2^20 bytes."""
    if task.on_gpu:
        torch.cuda.reset_peak_memory_stats(task.device)
    read = stopwatch.run(step)
    stopwatch.wait()
    return read(), torch.cuda.max_memory_allocated(task.device) / 2**20 if task.on_gpu else 0.0


def _graph_ms(task: Task, step: Callable[[], object], stopwatch: Stopwatch) -> float | None:
    """Median of CUDA-graph replays; None where the step cannot be captured."""
    captured = capture(step, task.device)
    return captured and time_one(captured.replay, task.repeats, stopwatch).ms


def prepare(task: Task) -> tuple[Any, Callable[[int], Callable[[], object]]]:
    """The model of a phase, and what makes a step with a batch: of training, with fp32 weights, bf16 autocast
    on a GPU and every block recomputed in the backward pass; prompts in one pass, with the logits of every
    token and the state; or a token."""
    if task.phase == "train":
        model = build(task, "train", torch.float32)
        for block in model.backbone.blocks:
            block.forward = partial(recomputed, block.forward)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
        step = partial(_training_step, model, optimizer, autocast=task.on_gpu)
        return model, lambda batch: partial(step, task.random_tokens(batch, task.length + 1))
    model = build(task, "inference", task.kept_dtype).eval()
    if task.phase == "decode":
        return model, partial(decoding_step, task, model)
    return model, lambda batch: torch.no_grad()(partial(model, task.random_tokens(batch, task.length)))


def _training_step(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor, *, autocast: bool) -> None:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        x, _ = model.backbone(model.embedding(tokens[:, :-1]))
        pieces = zip(x.split(LOSS_TOKENS, 1), tokens[:, 1:].split(LOSS_TOKENS, 1), strict=True)
        losses = [recomputed(_summed_loss, model, *piece) for piece in pieces]
    del x, _
    loss = torch.stack(losses).sum() / tokens[:, 1:].numel()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _summed_loss(model: Any, x: Tensor, targets: Tensor) -> Tensor:
    """As xLSTMLarge's forward ends, over a piece of the sequence: all logits would not fit."""
    soft_cap = importlib.import_module("xlstm.xlstm_large.components").soft_cap
    logits = soft_cap(model.lm_head(x), model.config.output_logit_soft_cap)
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def decoding_step(task: Task, model: Any, batch: int) -> Callable[[], object]:
    """A token from the token and the state before, greedily; both are overwritten."""
    dims, token = task.shape(batch), task.random_tokens(batch, 1)
    zeros = partial(torch.zeros, batch, task.heads, device=task.device)
    state = {layer: (zeros(dims.K, dims.V), zeros(dims.K), zeros(1)) for layer in range(task.layers)}

    @torch.no_grad()
    def step() -> None:
        logits, _ = model(token, state)
        token.copy_(logits.argmax(-1))

    return step


def _kernel_share(step: Callable[[], object], device: torch.device) -> float | None:
    """Share of the GPU's busy time in mLSTM kernels; None where the profiler sees no kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize(device)
    return share_of(
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
    )


def share_of(kernels: Iterable[tuple[str, float, float]]) -> float | None:
    """Share of the mLSTM kernels in the time of (name, start, end) triples; None where there is no time. A
    kernel that starts before those before it end waits for them: its time counts from there."""
    total = found = 0.0
    free = -math.inf
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1:]):
        time = max(end - max(start, free), 0.0)
        free = max(free, end)
        total += time
        if any(part in name for part in KERNELS) or name.startswith(INDUCTOR):
            found += time
    return found / total if total else None


# Agreement


def agreement(task: Task) -> list[Outcome]:
    """Logits and first losses of every variant against mlstm_kernels' fp32 native path, TRUTH. Errors of
    "prefill" and "decode" are relative Frobenius errors of logits, that of "train" is the largest
    difference of losses in nats; NaN where a result is not finite. The variant NOISE is the reference in
    the same dtypes: what rounding around the mLSTM comes to."""
    names = (TRUTH, NOISE, *(name for name in task.variants if name != NOISE))
    outcomes = [Outcome(name) for name in names]
    for kinds, collect in ((("prefill", "decode"), _logits), (("train",), _losses)):
        compute = collect(task)
        truth: tuple[Tensor, ...] = ()
        for outcome in outcomes:
            found = outcome.run(partial(compute, outcome.variant))
            truth = found if outcome.variant == TRUTH else truth
            if found and truth:
                pairs = zip(kinds, found, truth, strict=True)
                outcome.errors |= {kind: _difference(kind, own, exact) for kind, own, exact in pairs}
    return outcomes


# the results of a variant
Compute = Callable[[str], tuple[Tensor, ...]]


def _logits(task: Task) -> Compute:
    """fp32 logits of a prompt and of tokens that follow it one by one; the weights are rounded for all."""
    truth = build(task, "inference", torch.float32).eval()
    with torch.no_grad():
        for parameter in truth.parameters():
            parameter.copy_(parameter.to(task.kept_dtype))
    model = build(task, "inference", task.kept_dtype).eval()
    text = make_text(TEXT_BYTES, task.seed)
    prompt = windows(text, (1,), task.length + task.tokens, task.seed).to(task.device)

    @torch.no_grad()
    def logits(name: str) -> tuple[Tensor, ...]:
        own = truth if name == TRUTH else model
        use(own, "native" if name == TRUTH else name)
        first, state = own(prompt[:, : task.length])
        decoded = []
        for token in prompt[:, task.length :].split(1, dim=1):
            out, state = own(token, state)
            decoded.append(out.float())
        return first.float(), torch.cat(decoded, dim=1)

    return logits


def _losses(task: Task) -> Compute:
    """Losses of the first training steps from the same weights, over the same batches."""
    plan = task.losses
    if plan is None:
        return lambda name: ()
    model = build(replace(task, vocabulary=256, layers=plan.layers), "train", torch.float32)
    start = {name: x.clone() for name, x in model.state_dict().items()}
    text = make_text(TEXT_BYTES, task.seed)
    batches = windows(text, (plan.steps, plan.batch), plan.length + 1, task.seed).to(task.device)
    rates = [plan.rate * min(1.0, (step + 1) / WARM_UP_RATE) for step in range(plan.steps)]

    def losses(name: str) -> tuple[Tensor, ...]:
        model.load_state_dict(start)
        use(model, "native" if name == TRUTH else name)
        return (train(model, batches, rates, autocast=task.on_gpu and name != TRUTH),)

    return losses


def train(model: Any, batches: Tensor, rates: Sequence[float], *, autocast: bool) -> Tensor:
    """Train with AdamW, and return the loss of each step [steps] in nats per token.

    Args:
        batches: of each step [steps, B, S + 1], int64, on the model's device.
        rates: of each step, the learning rate.
        autocast: to bf16, over the parameters as they are.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    losses = torch.empty(len(batches), device=batches.device)
    for step, (tokens, rate) in enumerate(zip(batches, rates, strict=True)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            logits, _ = model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
    return losses


def _difference(kind: str, found: Tensor, truth: Tensor) -> float:
    """Of losses the largest, of logits relative Frobenius; NaN where one is not finite."""
    difference = found.double() - truth.double()
    error = difference.abs().max() if kind == "train" else difference.norm() / truth.double().norm()
    return error.item() if error.isfinite() else math.nan
