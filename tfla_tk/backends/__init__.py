"""Backends: tk (ThunderKittens kernels), triton (installed Triton kernels), reference (pure PyTorch).

`core/dispatch.py` finds what serves a kernel in each of them.
"""
