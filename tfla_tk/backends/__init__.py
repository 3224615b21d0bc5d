"""Backends: tk (ThunderKittens kernels), triton (installed Triton kernels), reference (pure PyTorch).

`registry` finds what serves a kernel in each of them.
"""
