"""Baselines beside FLA and the mLSTM kernels: FlashQLA and mamba_ssm, each called by its own function.

Neither is needed. A package that is missing, or that does not take a call, is told and left out.

FlashQLA serves the gated delta rule at K = V = 128. It is called directly: through FLA's dispatch it would
pay for FLA's host code.

mamba_ssm serves simple GLA. Its function takes x, dt, A, B and C, makes dt x of x, and decays by e^(dt A):
with A = -1, dt = -g, B = k, C = q and x = scale v / dt, made before anything is timed, it is simple GLA. dv
is made of dx when it is checked. dg is not: it would be the difference of ddt and of dx.x / dt, which the
rounding of dx dominates.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla_tk.core.errors import UnsupportedError
from tfla_tk.core.installed import find_package

from .inputs import OFFSETS, Named

FLASH_QLA, MAMBA = "tilelang:flash_qla", "triton:mamba_ssm"
_INSTALL_MAMBA = (
    "MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps --no-build-isolation mamba-ssm"
)
MAMBA_CHUNK = 256  # that of its own layers


# what is differentiated, by the rival's names, and its call of these in their order, which gives the output
Prepared = tuple[dict[str, Tensor], Callable[..., Tensor]]


class Rival(NamedTuple):
    """A function of another package.

    Attributes:
        operator: what it computes, by the name of an Operator.
        packages: what is imported, and how it is installed.
        prepare: of the operator's inputs; UnsupportedError where the rival does not take them.
        finish: of the operator's inputs and the results by the rival's names ("o", "dx"): the same by the
            operator's names.
        note: what to know of its rows.
    """

    operator: str
    packages: dict[str, str]
    prepare: Callable[[Named], Prepared]
    finish: Callable[[Named, dict[str, Tensor]], dict[str, Tensor]] = lambda inputs, results: results
    note: str = ""


def prepare(variant: str, inputs: Named) -> Prepared:
    """A rival's call on its own inputs; UnsupportedError where it is not installed or does not take them."""
    for package, remedy in RIVALS[variant].packages.items():
        if find_package(package) is None:
            raise UnsupportedError(variant, f"{package} is not installed", remedy)
    _check_gpu(variant, inputs["q"])
    return RIVALS[variant].prepare(inputs)


def _prepare_flash_qla(inputs: Named) -> Prepared:
    q, v = inputs["q"], inputs["v"]
    taken = (q.shape[-1], v.shape[-1]) == (128, 128) and q.dtype in (torch.bfloat16, torch.float16)
    if not taken:
        given = f"these are {q.dtype} of {q.shape[-1]} and {v.shape[-1]}"
        raise UnsupportedError(FLASH_QLA, f"it takes 16-bit q, k, v of K = V = 128, {given}", "use another")
    function = importlib.import_module("flash_qla").chunk_gated_delta_rule
    leaves = {name: tensor for name, tensor in inputs.items() if name != OFFSETS}
    offsets = inputs[OFFSETS].long() if OFFSETS in inputs else None

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return function(q, k, v, g, beta, cu_seqlens=offsets)[0]

    return leaves, call


def _prepare_mamba(inputs: Named) -> Prepared:
    q, k, v, g = (inputs[name] for name in "qkvg")
    function = _mamba_module().mamba_chunk_scan_combined
    x = (v.float() * _factor(inputs)).to(v.dtype)
    a = torch.full((v.shape[2],), -1.0, device=v.device)
    sequences = None  # [1, T] int32: the number of each token's sequence
    if OFFSETS in inputs:
        lengths = inputs[OFFSETS].diff().long()
        numbers = torch.arange(lengths.numel(), dtype=torch.int32, device=v.device)
        sequences = numbers.repeat_interleave(lengths)[None]

    def call(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return function(x, dt, a, b, c, chunk_size=MAMBA_CHUNK, seq_idx=sequences)

    return {"x": x, "dt": -g, "b": k, "c": q}, call


def _finish_mamba(inputs: Named, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """dq is that of c, dk that of b, and dv comes of dx; dg is left out."""
    named = {"o": "o", "dq": "dc", "dk": "db", "dv": "dx"}
    found = {ours: results[theirs] for ours, theirs in named.items() if theirs in results}
    return found | {"dv": found["dv"].float() * _factor(inputs)} if "dv" in found else found


def _factor(inputs: Named) -> Tensor:
    """Of x over v: scale / dt."""
    return (inputs["q"].shape[-1] ** -0.5 / -inputs["g"])[..., None]


def _mamba_module() -> Any:
    """mamba_ssm.ops.triton.ssd_combined. The package imports extensions compiled for CUDA on import, which
    its Triton kernels do not use: one without code stands in its place."""
    spec = find_package("mamba_ssm")
    if spec is None or spec.submodule_search_locations is None:
        raise UnsupportedError(MAMBA, "mamba_ssm is no package", _INSTALL_MAMBA)
    package = ModuleType("mamba_ssm")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules.setdefault("mamba_ssm", package)
    return importlib.import_module("mamba_ssm.ops.triton.ssd_combined")


def _check_gpu(variant: str, tensor: Tensor) -> None:
    if not tensor.is_cuda:
        raise UnsupportedError(variant, "its kernels need a GPU", "run on a GPU")


# by their names, as --backends and rows have them
RIVALS = {
    FLASH_QLA: Rival("gated_delta_rule", {"flash_qla": "pip install flash-qla"}, _prepare_flash_qla),
    MAMBA: Rival(
        "simple_gla",
        {"mamba_ssm": _INSTALL_MAMBA, "einops": "pip install einops"},
        _prepare_mamba,
        _finish_mamba,
        note="x = scale v / dt made beforehand; ddt computed in the place of dg, not checked",
    ),
}
