"""Descriptions of calls, one module for each family, with the checks of its arguments.

Checks raise TypeError for what is no tensor, a wrong dtype, mixed dtypes or a wrong Python type, and
ValueError for a wrong rank, shape, device or value.
"""
