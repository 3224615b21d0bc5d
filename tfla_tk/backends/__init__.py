"""Backends in the order that "auto" tries them.

tk (ThunderKittens kernels), triton (adapters onto mlstm_kernels and fla), reference (pure PyTorch). A module
is imported on the first call that considers it.
"""
