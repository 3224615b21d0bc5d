"""Two gloo processes: DTensors are refused with a remedy, and the remedy gives what one process computes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch has no distributed package"
)

SCRIPT = """
import os, re, sys
import torch
import tfla_tk
assert "torch.distributed.tensor" not in sys.modules
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

place, other = sys.argv[1], os.fork()  # the imports take the most time
rank = int(other != 0)
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
generator = torch.Generator().manual_seed(0)
shapes = {"q": (2, 4, 20, 8), "k": (2, 4, 20, 8), "v": (2, 4, 20, 16), "i": (2, 4, 20), "f": (2, 4, 20)}
full = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
state = {"c": (2, 4, 8, 16), "n": (2, 4, 8), "m": (2, 4, 1)}
state = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in state.items()}
one = {name: x[:, :, 0] if name in "qkv" else x[..., :1] for name, x in full.items()}
weights = torch.randn(2, 4, 20, 16, generator=generator, dtype=torch.float64)

def refused(function, tensors, name):
    try:
        function(**tensors)
    except TypeError as error:
        pattern = rf"{name}: expected a local tensor .*to_local.*from_local.*, got a DTensor"
        assert re.match(pattern, str(error)), error
    else:
        raise AssertionError(f"{function.__name__} took a DTensor as {name}")

def shard(x, dim):
    return distribute_tensor(x, mesh, [Shard(dim)])

for suffix in ("chunkwise", "step", "sequence"):
    for gate in ("mlstm", "mlstm_siging"):
        function = getattr(tfla_tk, f"{gate}_{suffix}")
        own = full if suffix != "step" else one
        if suffix == "chunkwise":
            own = own | {f"{name}_initial": x for name, x in state.items()}
        else:
            own = own | {name: x for name, x in state.items() if name != "m" or gate == "mlstm"}
        function(**own)
        for name in own:
            refused(function, own | {name: shard(own[name], 0)}, name)
        refused(function, {name: shard(x, 0) for name, x in own.items()}, "q")
        try:
            tfla_tk.which(function, **{name: shard(x, 0) for name, x in own.items()})
        except TypeError as error:
            assert "got a DTensor" in str(error)
        else:
            raise AssertionError("which took a DTensor")
        if suffix == "chunkwise":
            packed = {name: x[:1] for name, x in own.items()}
            offsets = torch.tensor([0, 20])
            refused(function, packed | {"cu_seqlens": shard(offsets, 0)}, "cu_seqlens")

truth = {name: x.clone().requires_grad_() for name, x in full.items()}
expected = tfla_tk.mlstm_chunkwise(**truth)
(expected * weights).sum().backward()
for dim in (0, 1):
    leaves = {name: shard(x, dim).requires_grad_() for name, x in full.items()}
    h = tfla_tk.mlstm_chunkwise(**{name: x.to_local() for name, x in leaves.items()})
    h = DTensor.from_local(h, leaves["q"].device_mesh, leaves["q"].placements)
    torch.testing.assert_close(h.full_tensor(), expected)
    (h * shard(weights, dim)).sum().backward()
    for name, x in leaves.items():
        torch.testing.assert_close(x.grad.full_tensor(), truth[name].grad)
dist.barrier()  # or one process closes its connections while the other still uses them
dist.destroy_process_group()
if other:
    sys.exit(os.waitpid(other, 0)[1] != 0)
"""


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "meeting point")]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-3000:]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
