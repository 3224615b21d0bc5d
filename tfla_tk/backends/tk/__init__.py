"""The ThunderKittens kernels: what runs here (`device`), tensors as kernels take them (`prepared`), families.

`mlstm` and `linear` are what `core/dispatch.py` finds; launches are in a module or folder for each family.
These raise BuildError where a kernel is not compiled yet and cannot be, RuntimeError where a launch is
refused.
"""
