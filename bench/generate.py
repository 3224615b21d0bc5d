"""`python -m tfla_tk.bench generate`: tokens per second of `generate()`, with and without `accelerate()`.

Two models of four layers with random weights: of Hugging Face's Qwen3-Next, with dense MLPs, and of FLA's
GLA. The kernels and FLA's own functions run over the same weights and prompts in rounds. Without a GPU, where
FLA's functions cannot run, a toy of the first one runs on the reference.

Exit status: 0 done; 1 where a model fails, or the kernels have not served every call.
"""

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tfla_tk.integrations import fla as integration

from . import environment, fla, report, results
from .results import GENERATED, Row
from .runner import FAILED, release, verdict_on
from .shapes import ModelShape
from .timing import Stopwatch, Timing
from .usage import add_options

PROMPT = 16
VOCABULARY = 32768
FULL, QUICK = (128, 5), (16, 2)  # tokens of a text, timed texts
VARIANTS = ("tk", fla.VARIANT)
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def make_qwen3_next(sizes: ModelShape) -> nn.Module:
    """The last layer has softmax attention, as every fourth of the published model, all have dense MLPs."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.width,
        intermediate_size=5 * sizes.width // 2,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.width // sizes.K,
        num_key_value_heads=max(1, sizes.width // sizes.K // 8),
        head_dim=2 * sizes.K,
        linear_num_key_heads=sizes.H,
        linear_num_value_heads=sizes.value_heads,
        linear_key_head_dim=sizes.K,
        linear_value_head_dim=sizes.V,
        layer_types=["linear_attention"] * (sizes.layers - 1) + ["full_attention"],
        mlp_only_layers=list(range(sizes.layers)),
        **TOKENS,
    )
    return transformers.Qwen3NextForCausalLM(config)


def make_gla(sizes: ModelShape) -> nn.Module:
    """FLA's GLA, whose head dims follow from width and heads."""
    models: Any = importlib.import_module("fla.models")
    sized = {"hidden_size": sizes.width, "num_hidden_layers": sizes.layers, "num_heads": sizes.H}
    return take_cache(models.GLAForCausalLM(models.GLAConfig(vocab_size=VOCABULARY, **sized, **TOKENS)))


def take_cache(model: nn.Module) -> nn.Module:
    """A model of fla 0.6 for transformers from 5.24 on, whose `generate()` calls the cache `cache`.
    Without this it overlooks the cache, and goes on from the last token alone."""
    forward = model.forward

    def with_cache(*args: Any, cache: Any = None, **options: Any) -> Any:
        return forward(*args, **{"past_key_values": cache} | options)

    model.forward = with_cache
    return model


MAKE = dict(zip(GENERATED, (make_qwen3_next, make_gla), strict=True))
# H, K, V and HV are of the linear layers; batch and tokens are those of a row
ON_A_CPU = {GENERATED[0]: ModelShape(1, 1, 2, 16, 16, layers=2, width=32, HV=4)}
ON_A_GPU = {
    GENERATED[0]: ModelShape(1, 1, 16, 128, 128, layers=4, width=2048, HV=32),
    GENERATED[1]: ModelShape(1, 1, 4, 256, 512, layers=4, width=2048),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tfla_tk.bench generate`."""
    add_options(parser, "--json", "--update-results", "--commit")
    add_options(parser, "--seed", help="of weights and prompts (default: 0)")
    add_options(parser, "--quick", help="batch 1, 16 tokens, 2 runs")


def run(args: argparse.Namespace) -> int:
    """Run the models, print their tables and keep the rows; returns the exit status."""
    session = environment.Session(args)
    new, repeats = QUICK if args.quick else FULL
    batches = (1,) if args.quick or not session.on_gpu else (1, 64)
    told = f"run {session.facts['run']}; prompts of {PROMPT} tokens"
    session.console.print(f"{environment.heading(session.facts)}; {told}")
    note = f"generate() with prompts of {PROMPT} tokens, without CUDA graphs"
    more = {"rel_err": {}, "peak_mem_mb": None, "note": note, **session.facts}
    failed: list[str] = []
    for name, sizes in (ON_A_GPU if session.on_gpu else ON_A_CPU).items():
        model_title = results.TITLES[name]
        rows: list[Row] = []
        try:
            torch.manual_seed(args.seed)
            dtype = torch.bfloat16 if session.on_gpu else torch.float32
            model = MAKE[name](sizes).to(session.device, dtype).eval()
            for batch in batches:
                shape = replace(sizes, B=batch, T=new)
                prompt = torch.randint(2, VOCABULARY, (batch, PROMPT), device=session.device)
                found = _measure(model, prompt, new, repeats, session)
                for variant, (times, refused) in found.items():
                    kind = (variant, "bf16") if session.on_gpu else ("reference", "fp32")
                    rows.append(results.new_row(name, shape, "decode", *kind, times, **more))
                    failed += [f"{model_title}, B{batch}: {told}" for told in refused]
        except Exception as error:  # of a package of others: the next model may run
            failed.append(f"{model_title}: {FAILED}: {verdict_on(error)[1]}")
            continue
        finally:
            integration.restore()
            release(session.device)
        lines = [(row["backend"], _cells(row, rows)) for row in rows]
        title = f"{model_title}, {replace(sizes, B=batches[-1], T=new)}"
        session.print_table(title, report.filled_table("variant", lines))
        session.add(rows)
    session.print_lines(f"  {line}" for line in failed)
    session.tell()
    return 1 if failed else 0


def _measure(
    model: Any, prompt: Tensor, new: int, repeats: int, session: environment.Session
) -> dict[str, tuple[Timing, list[str]]]:
    """By variant the times of a text, and what of the last one the kernels have not served."""
    stopwatch = Stopwatch(session.device)
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS[: 2 if session.on_gpu else 1]}
    refused: dict[str, list[str]] = {}
    for _ in range(repeats + 1):
        for variant, own in times.items():
            ms, refused[variant] = _one_text(model, variant, prompt, new, stopwatch, on_gpu=session.on_gpu)
            own.append(ms)
    # the first text compiles
    return {variant: (Timing.of(own[1:]), refused[variant]) for variant, own in times.items()}


def _cells(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    batch, new = row["shape"]["B"], row["shape"]["T"]
    cells = {"B": str(batch), "ms a token": report.milliseconds(row["ms"] / new)}
    cells["tokens/s"] = f"{batch * new / row['ms'] * 1e3:,.0f}"
    for other in rows:
        if other["backend"] == fla.VARIANT and other["shape"] == row["shape"]:
            cells["speed-up"] = f"{other['ms'] / row['ms']:.2f}x"
    return cells


def _one_text(
    model: Any, variant: str, prompt: Tensor, new: int, stopwatch: Stopwatch, *, on_gpu: bool
) -> tuple[float, list[str]]:
    """ms of `generate()`, and which of its calls the kernels have not served."""
    integration.restore()
    if variant == "tk":
        integration.accelerate()
    lengths = {"max_new_tokens": new, "min_new_tokens": new}
    mask = torch.ones_like(prompt)
    generate = partial(model.generate, prompt, attention_mask=mask, do_sample=False, **lengths)
    ms = stopwatch.run(torch.no_grad()(generate))()
    paths, wanted = integration.paths(), "tk" if on_gpu else "reference"
    others = [
        f"{function} was served by {backend} {count} times"
        for function, counts in paths.items()
        for backend, count in counts.items()
        if backend != wanted
    ]
    if variant == "tk" and not paths:
        others.append("no call came to the kernels")
    return ms, others
