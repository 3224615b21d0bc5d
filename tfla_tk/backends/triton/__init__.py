"""Adapters onto existing Triton kernels, one module for each package that has them.

They are the baseline of every comparison, used as installed packages and called as their users call them.
What they get wrong is refused here with the reason, or marked "by name only" where the result is usable but
not exact; docs/triton-baselines.md lists each defect with the test that shows it.
"""
