"""The ThunderKittens kernels: what runs here (`device`), tensors as kernels take them (`prepared`), families.

A family's own module, such as `mlstm`, is what the registry finds; its launches are in a folder of kernels.
These raise BuildError where a kernel is not compiled yet and cannot be, RuntimeError where a launch is
refused.
"""
