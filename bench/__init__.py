"""Side-by-side comparison of tfla_tk's backends: speed, share of the roofline, memory and error against fp64.

`tfla-tk compare` is the command (see `compare`); `python -m tfla_tk.bench` keeps the results on record.
docs/benchmarks-method.md says how the figures are made.
"""
