"""What this machine offers (GPU, compilers, libraries), and the backend that each operator would use."""

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tfla_tk import env
from tfla_tk.backends.triton.installation import triton_version
from tfla_tk.build import prebuilt
from tfla_tk.build.cache import count_modules
from tfla_tk.build.errors import BuildError
from tfla_tk.build.instances import shipped_instances
from tfla_tk.build.locking import cache_root, is_writable
from tfla_tk.build.thunderkittens import find_thunderkittens
from tfla_tk.build.toolchain import find_toolchain
from tfla_tk.core.dispatch import OPERATORS, which
from tfla_tk.core.errors import UnsupportedError

_BASELINES = ("mlstm_kernels", "fla-core", "flash-linear-attention", "flash-qla", "mamba-ssm")
_NAMES = {"triton": "Triton", "reference": "the PyTorch reference"}
_ON_TRITON = ("fla-core", "flash-linear-attention")
LIBRARIES = ("torch", "triton", "einops", *_BASELINES, "xlstm", "transformers", "matplotlib")
_GPU_FIELDS = ("name", "driver_version", "compute_cap", "memory.total")
_SMI_TIMEOUT_S = 30


def report() -> dict[str, Any]:
    """Everything that ``tfla-tk doctor`` prints, as plain values that JSON can hold.

    Nothing is compiled or fetched, and nothing is raised: what cannot be found, or fails, is an entry with
    ``error`` and ``remedy`` in place of its value.
    """
    found = {
        "tfla_tk": _told(version, "tfla_tk"),
        "python": platform.python_version(),
        "platform": _told(platform.platform),
        "gpus": _told(_gpus),
        "torch_cuda": torch.version.cuda,
        "torch_sees_gpu": _told(torch.cuda.is_available),
        "libraries": {name: _told(version, name) for name in LIBRARIES},
        "nvcc": _told(_found, "nvcc", find_toolchain),
        "thunderkittens": _told(partial(_found, "root", find_thunderkittens, clone=False)),
        "prebuilt": _told(_prebuilt),
        "cache": _told(_cache),
        "environment": {variable.name: variable.get() for variable in env.VARIABLES},
        "operators": {name: _choices(name) for name in sorted(OPERATORS)},
    }
    return found | {"verdict": _verdict(found)}


def render(found: dict[str, Any]) -> str:
    ours = ", ".join(_text(found[name], str) for name in ("tfla_tk", "platform"))
    lines = [_line("tfla_tk", f"{ours}, Python {found['python']}")]
    gpus = found["gpus"] or ["none (nvidia-smi is absent or reports no device)"]
    for gpu in [gpus] if _is_error(gpus) else gpus:
        lines.append(_line("GPU", gpu if isinstance(gpu, str) else _text(gpu, _gpu_text)))
    cuda = found["torch_cuda"] or "none, a CPU build"
    sees = _text(found["torch_sees_gpu"], lambda sees: "sees a GPU" if sees else "sees no GPU")
    lines.append(_line("torch CUDA", f"{cuda}; torch {sees}"))
    for name, version in found["libraries"].items():
        text = _text(version, lambda version: version or "not installed")
        lacks_triton = name in _ON_TRITON and version and found["libraries"]["triton"] is None
        lines.append(_line(name, f"{text} (installed, but it needs triton)" if lacks_triton else text))
    place = "{path} ({version}; found by {found_by})".format_map
    lines += [_line(name, _text(found[name], place)) for name in ("nvcc", "thunderkittens")]
    lines.append(_line("kernels", _text(found["prebuilt"], _prebuilt_text)))
    state = "{path} ({writable}writable, {modules} compiled files)".format_map
    lines.append(
        _line("cache", _text(found["cache"], lambda x: state(x | {"writable": "not " * (not x["writable"])})))
    )
    lines += [_line(name, value) for name, value in found["environment"].items() if value]
    # those of the same verdicts one below the other, then the verdicts
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, uses in found["operators"].items():
        for use, choice in uses.items():
            chosen = _text(choice, lambda choice: str(choice["backend"]))
            reasons = {} if _is_error(choice) else choice["reasons"]
            verdicts = tuple(f"  {backend:<10} {verdict}" for backend, verdict in reasons.items())
            alike.setdefault((chosen, *verdicts), []).append(f"{name}, {use}: {chosen}")
    for key, heads in alike.items():
        lines += ["", *heads, *key[1:]]
    return "\n".join([*lines, "", found["verdict"]])


def version(distribution: str) -> str | None:
    """The version of an installed distribution, or None; of Triton whatever its distribution is called."""
    if distribution == "triton":
        return triton_version()
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _line(name: str, text: str) -> str:
    return f"{name:<28}" + text.replace("\n", "\n" + " " * 28)


def _gpu_text(gpu: dict[str, str]) -> str:
    hopper = "" if gpu["compute_cap"] == "9.0" else "; the tk kernels need 9.0"
    return f"{gpu['name']}, compute capability {gpu['compute_cap']}{hopper}, driver {gpu['driver_version']}"


def _prebuilt_text(entry: dict[str, Any]) -> str:
    if not entry["kernels"]:
        return "none came with the package; each is compiled on its first call"
    came = f"{entry['kernels']} of {entry['of']} came with the package, compiled by CUDA {entry['cuda']}"
    return came if entry["kernels"] == entry["of"] else f"{came}; others are compiled on their first call"


def _text(value: Any, tell: Callable[[Any], str]) -> str:
    """What `tell` makes of a value of the report, or its error with the remedy."""
    if not _is_error(value):
        return tell(value)
    remedy = f"\nremedy: {value['remedy']}" if value["remedy"] else ""
    return f"not usable: {value['error']}{remedy}"


def _is_error(value: Any) -> bool:
    return isinstance(value, dict) and "error" in value


def _gpus() -> list[dict[str, str]]:
    """One entry per GPU, as nvidia-smi tells it: it needs no CUDA build of torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [dict(zip(_GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(_GPU_FIELDS)]


def _told(find: Callable[..., Any], *arguments: Any) -> Any:
    """What `find` returns, or an entry with the error that it raises: one fault hides no other section."""
    try:
        return find(*arguments)
    except (BuildError, UnsupportedError) as error:
        return {"error": error.reason, "remedy": error.remedy}
    except Exception as error:  # whatever ails this machine
        return {"error": f"{type(error).__name__}: {error}", "remedy": ""}


def _found(place: str, find: Callable[..., Any], **options: bool) -> dict[str, str]:
    found = find(**options)
    return {"path": str(getattr(found, place)), "version": found.identity, "found_by": found.origin}


def _prebuilt() -> dict[str, Any]:
    index, shipped = prebuilt.index(), shipped_instances()
    cuda = None if index is None else ".".join(map(str, index.cuda))
    found = 0 if index is None else sum(prebuilt.find(instance) is not None for instance in shipped)
    return {"cuda": cuda, "kernels": found, "of": len(shipped)}


def _cache() -> dict[str, Any]:
    path = cache_root()
    count = count_modules()
    try:
        writable = is_writable(path)
    except BuildError:  # a file is in its place
        writable = False
    return {"path": str(path), "writable": writable, "modules": count}


def _choices(name: str) -> dict[str, dict[str, Any]]:
    return {use: _told(_choice, name, use) for use in ("inference", "training")}


def _choice(name: str, use: str) -> dict[str, Any]:
    choice = which(name, *_example(name, requires_grad=use == "training"))
    on_gpu = torch.cuda.is_available()
    # without a GPU it alone counts: what else a refusal tells is of the example, which then lies on the CPU
    reasons = {
        backend: str(support) if support.ok or on_gpu else "no: torch sees no GPU"
        for backend, support in choice.reasons.items()
    }
    return {"backend": choice.backend, "reasons": reasons}


def _decodes(name: str) -> bool:
    """Whether an operator is for decoding, where gradients are not what counts."""
    return name.startswith("fused_recurrent_") or name.endswith(("_step", "_sequence"))


def _verdict(found: dict[str, Any]) -> str:
    """In one sentence what serves the operators, and where it is not the kernels what they lack."""
    operators = found["operators"]
    known = [choice for uses in operators.values() for choice in uses.values() if not _is_error(choice)]
    if not known:
        return "It is not known what serves the operators."
    others = [
        name
        for name, uses in operators.items()
        for use in (["inference"] if _decodes(name) else uses)
        if uses[use].get("backend") != "tk"
    ]
    backends = {choice["backend"] for choice in known}
    if not others:
        return "The kernels serve every operator."
    if "tk" in backends:
        return f"The kernels serve every operator but {', '.join(dict.fromkeys(others))}."
    capabilities = [] if _is_error(found["gpus"]) else [gpu["compute_cap"] for gpu in found["gpus"]]
    sees_gpu = found["torch_sees_gpu"] is True
    if "9.0" not in capabilities and (capabilities or not sees_gpu):
        cause = "No Hopper GPU"
    elif not sees_gpu:
        cause = "torch sees no GPU"
    else:
        cause = known[0]["reasons"]["tk"].splitlines()[0].removeprefix("no: ").rstrip(":")
    names = " or ".join(name for backend, name in _NAMES.items() if backend in backends)
    return f"{cause}: every operator runs on {names} here."


# of every operator the arguments of its example behind q, k and v; numbers are themselves
_OF_BOTH_WAYS: dict[str, tuple[str | int, ...]] = {
    "delta_rule": ("beta",),
    "gla": ("g of channels",),
    "kda": ("g of channels", "beta"),
    "retention": (),
    "simple_gla": ("g",),
}
EXAMPLES: dict[str, tuple[str | int, ...]] = {
    **{f"{way}_{op}": of for way in ("chunk", "fused_recurrent") for op, of in _OF_BOTH_WAYS.items()},
    "chunk_gated_delta_rule": ("g", "beta"),
    "fused_recurrent_gated_delta_rule": ("g",),
    "chunk_lightning_attn": (0, 1),  # the number of the layer and of all layers
    **dict.fromkeys(("mlstm_chunkwise", "mlstm_siging_chunkwise"), ("i", "f")),
    **dict.fromkeys(("mlstm_step", "mlstm_sequence"), ("i", "f", "c", "n", "m")),
    **dict.fromkeys(("mlstm_siging_step", "mlstm_siging_sequence"), ("i", "f", "c", "n")),
}


def _example(name: str, *, requires_grad: bool) -> list[Any]:
    """The arguments of a small call: one batch entry, one head, 64 tokens, or of decoding 8 or one; head dims
    128 and 256 of mLSTM, else 128 and 128."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    is_mlstm = name.startswith("mlstm")
    dim_v = 256 if is_mlstm else 128
    tokens = [64]
    if _decodes(name):
        tokens = [8] if name.endswith("_sequence") else [] if is_mlstm else [1]
    sizes = [1, 1, *tokens] if is_mlstm else [1, *tokens, 1]
    shapes = {"q": [*sizes, 128], "k": [*sizes, 128], "v": [*sizes, dim_v], "g of channels": [*sizes, 128]}
    shapes |= {"c": [1, 1, 128, dim_v], "n": [1, 1, 128], "m": [1, 1, 1]}
    found: list[Any] = []
    for argument in ("q", "k", "v", *EXAMPLES[name]):
        if isinstance(argument, int):
            found.append(argument)
            continue
        is_operand = argument in ("q", "k", "v")
        shape = shapes.get(argument, sizes if tokens else [1, 1, 1])  # else of a gate
        tensor = torch.zeros(shape, device=device, dtype=dtype if is_operand else torch.float32)
        found.append(
            tensor.requires_grad_(requires_grad and (is_operand or not (is_mlstm and _decodes(name))))
        )
    return found
