"""Times of GLA's forward and backward, per kernel, and the peak of memory. Run under `timeout 300`."""
# ruff: noqa

import torch
from torch.nn.functional import logsigmoid

from tfla_tk import chunk_gla


def burst(function, repeats):
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    flush.zero_()
    events[0].record()
    for _ in range(repeats):
        function()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / repeats


print(torch.cuda.get_device_name(), flush=True)
for batch, seq, heads, dims in (
    (8, 8192, 16, (128, 128)),
    (4, 4096, 16, (128, 128)),
    (4, 4096, 16, (64, 64)),
):
    gen = torch.Generator("cuda").manual_seed(0)
    n = lambda *s: torch.randn(s, generator=gen, device="cuda")
    q, k = (n(batch, seq, heads, dims[0]).bfloat16().requires_grad_() for _ in "qk")
    v = n(batch, seq, heads, dims[1]).bfloat16().requires_grad_()
    g = logsigmoid(n(batch, seq, heads, dims[0]) + 2).requires_grad_()
    do = n(batch, seq, heads, dims[1]).bfloat16()
    leaves = (q, k, v, g)

    def forward():
        with torch.no_grad():
            return chunk_gla(*leaves, backend="tk")[0]

    def both():
        return torch.autograd.grad(chunk_gla(*leaves, backend="tk")[0], leaves, do)

    for _ in range(3):
        both()
    torch.cuda.synchronize()
    repeats = 10 if batch == 8 else 30
    times = {}
    for name, function in (("forward", forward), ("both", both)):
        function()
        times[name] = sorted(burst(function, repeats) for _ in range(7))[3]
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - base) / 2**20
    print(
        f"B{batch} T{seq} H{heads} {dims[0]}/{dims[1]}: forward {times['forward']:.3f} ms, forward + backward {times['both']:.3f} ms, peak {peak:.0f} MiB above the inputs",
        flush=True,
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            both()
        torch.cuda.synchronize()
    for event in sorted(profile.key_averages(), key=lambda e: -e.device_time_total)[:6]:
        print(f"    {event.device_time / 1e3:8.3f} ms x {event.count / 5:.0f}  {event.key[:110]}", flush=True)
    del q, k, v, g, do, leaves
