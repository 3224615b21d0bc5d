"""CUDA graphs of the bench: how many kernels a step launches, and steps that cannot be captured."""

from __future__ import annotations

import pytest
import torch

from tfla_tk.bench import timing

DEVICE = torch.device("cuda")


def test_the_launches_of_a_captured_step_are_counted() -> None:
    x = torch.zeros(1000, device=DEVICE)

    def step() -> None:
        x.add_(1)
        x.mul_(2)
        x.sub_(1)

    captured = timing.capture(step, DEVICE)
    assert captured is not None and captured.launches == 3
    x.fill_(1)
    captured.replay()
    assert (x == 3).all()


def test_a_step_that_waits_for_the_gpu_is_not_captured() -> None:
    x = torch.ones(1000, device=DEVICE)
    assert timing.capture(lambda: x.sum().item(), DEVICE) is None
    assert x.add_(1).sum().item() == 2000


def test_an_empty_launch_takes_microseconds() -> None:
    assert 0.5 < timing.launch_us(torch.cuda.synchronize) < 50


def test_a_step_that_raises_is_not_captured() -> None:
    def step() -> None:
        if torch.cuda.is_current_stream_capturing():
            raise TypeError("not within a graph")

    assert timing.capture(step, DEVICE) is None


@pytest.mark.parametrize("count", [1, 40])
def test_a_graph_of_many_kernels(count: int) -> None:
    x = torch.zeros(8, device=DEVICE)

    def step() -> None:
        for _ in range(count):
            x.add_(1)

    captured = timing.capture(step, DEVICE)
    assert captured is not None and captured.launches == count
