"""One phase of `python -m tfla_tk.bench model`, in a process of its own.

    python -m tfla_tk.bench.model_phases TASK.json JOURNAL

The phases run xlstm's xLSTMLarge on several kernels in turn: the same weights and inputs, rounds in which
each of them has one run. Every fact goes into the journal as it is known, one JSON object per line, so that
it survives a compiler that aborts the process; `model_step` reads them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .model_agreement import agreement
from .model_task import (
    AGREEMENT,
    INDUCTOR,
    KERNELS,
    LOSS_TOKENS,
    Bound,
    Note,
    Task,
    bind,
    bindings,
    build,
    kept_dtype,
    random_tokens,
    recomputed,
    release_memory,
    verdict,
)
from .timing import (
    CpuStopwatch,
    CudaStopwatch,
    Stopwatch,
    SyncStopwatch,
    Timing,
    capture,
    time_one,
)


def perform(task: Task, note: Note) -> None:
    """Do the task; `note` is called with the fields of every fact.

    Noted are, with the variant's name: `running` before it does anything; with the `batch`, figures (`ms`,
    `p20`, `p80`, `repeats`, `peak_mem_mb`, `graph_ms`, `kernel_share`); `errors` as `agreement` tells;
    `status` and `reason` where it raised.
    """
    if task.on_gpu:
        torch.cuda.set_device(task.device)
    (agreement if task.phase == AGREEMENT else measure)(task, note)


def measure(task: Task, note: Note) -> None:
    """Warm the variants up and time them in rounds, batch by batch; the profiler, which slows launches, last.

    A variant that raises is out, the others go on; where memory does not suffice, nothing goes on.
    """
    if task.phase == "train":
        model = build(task, "train", torch.float32)
    else:
        model = build(task, "inference", kept_dtype(task)).eval()
    make_step = {"train": _training, "prefill": _prefill, "decode": _decode}[task.phase](task, model)
    stopwatch = _stopwatch(task)
    bound: dict[str, Bound] = {}
    for variant in task.variants:
        note(variant=variant, running=True)
        try:
            bound[variant] = bindings(model, variant)
        except Exception as error:
            note(variant=variant, **verdict(error))
    for batch in task.batches:
        step = make_step(batch)
        for variant in list(bound):
            try:
                note(variant=variant, running=True)
                bind(bound[variant])
                step()
            except Exception as error:
                note(variant=variant, batch=batch, **verdict(error))
                del bound[variant]
                if isinstance(error, torch.OutOfMemoryError):
                    return
                release_memory(task)
        _time(task, batch, step, bound, stopwatch, note)
    if task.on_gpu:
        for batch in task.batches:
            step = make_step(batch)
            for variant, found in bound.items():
                note(variant=variant, running=True)
                bind(found)
                share = _kernel_share(step, torch.device(task.device))
                note(variant=variant, batch=batch, kernel_share=share)


def _time(
    task: Task,
    batch: int,
    step: Callable[[], object],
    bound: Mapping[str, Bound],
    stopwatch: Stopwatch,
    note: Note,
) -> None:
    """Rounds of one run of every variant, then replays of its CUDA graph where that is how it is used."""
    times: dict[str, list[float]] = {variant: [] for variant in bound}
    memory: dict[str, list[float]] = {variant: [] for variant in bound}
    for _ in range(task.repeats):
        for variant, found in bound.items():
            note(variant=variant, running=True)
            bind(found)
            if task.on_gpu:
                torch.cuda.reset_peak_memory_stats(task.device)
            read = stopwatch.run(step)
            stopwatch.wait()
            times[variant].append(read())
            if task.on_gpu:
                memory[variant].append(torch.cuda.max_memory_allocated(task.device) / 2**20)
    for variant in bound:
        facts = dataclasses.asdict(Timing.of(times[variant]))
        if memory[variant]:
            facts["peak_mem_mb"] = max(memory[variant])
        note(variant=variant, batch=batch, **facts)
    if task.phase == "decode" and task.on_gpu:
        for variant, found in bound.items():
            note(variant=variant, running=True)
            bind(found)
            note(variant=variant, batch=batch, graph_ms=_graph_ms(task, step, stopwatch))
            release_memory(task)


def _training(task: Task, model: Any) -> Callable[[int], Callable[[], object]]:
    """Training steps: fp32 weights, bf16 autocast on a GPU, every block recomputed in the backward pass."""
    for block in model.backbone.blocks:
        block.forward = partial(recomputed, block.forward)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)

    def make_step(batch: int) -> Callable[[], object]:
        tokens = random_tokens(task, batch, task.length + 1)
        return partial(_training_step, model, optimizer, tokens, autocast=task.on_gpu)

    return make_step


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


def _prefill(task: Task, model: Any) -> Callable[[int], Callable[[], object]]:
    """Prompts through the model in one pass, with the logits of every token and the state."""

    def make_step(batch: int) -> Callable[[], object]:
        return torch.no_grad()(partial(model, random_tokens(task, batch, task.length)))

    return make_step


def _decode(task: Task, model: Any) -> Callable[[int], Callable[[], object]]:
    """Tokens from the token and the state before, greedily; both are overwritten."""
    dim_qk, dim_v = task.head_dims

    def make_step(batch: int) -> Callable[[], object]:
        token = random_tokens(task, batch, 1)
        zeros = partial(torch.zeros, batch, task.heads, device=task.device)
        state = {layer: (zeros(dim_qk, dim_v), zeros(dim_qk), zeros(1)) for layer in range(task.layers)}

        @torch.no_grad()
        def step() -> None:
            logits, _ = model(token, state)
            token.copy_(logits.argmax(-1))

        return step

    return make_step


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
    """Share of the mLSTM kernels in the time of (name, start, end) triples; None where there is no time.

    A kernel that starts before those before it end waits for them: its time counts from there.
    """
    total = found = 0.0
    free = -math.inf
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1:]):
        time = max(end - max(start, free), 0.0)
        free = max(free, end)
        total += time
        if any(part in name for part in KERNELS) or name.startswith(INDUCTOR):
            found += time
    return found / total if total else None


def _graph_ms(task: Task, step: Callable[[], object], stopwatch: Stopwatch) -> float | None:
    """Median over replays of a CUDA graph of the step; None where it cannot be captured."""
    captured = capture(step, torch.device(task.device))
    if captured is None:
        return None
    return time_one(captured.replay, task.repeats, stopwatch).ms


def _stopwatch(task: Task) -> Stopwatch:
    """Long steps are timed without an untimed run and without a flush of the L2 cache before."""
    if not task.on_gpu:
        return CpuStopwatch()
    device = torch.device(task.device)
    return CudaStopwatch(device) if task.phase == "decode" else SyncStopwatch(device)


def main(argv: Sequence[str]) -> int:
    """Perform the task of a file and write the journal."""
    task, journal = Task.load(Path(argv[0])), Path(argv[1])
    with journal.open("w", encoding="utf-8") as file:

        def note(**fact: Any) -> None:
            # at once: the process may not live to close the file
            file.write(json.dumps(fact) + "\n")
            file.flush()

        perform(task, note)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
