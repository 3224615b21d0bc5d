"""The registered ops: importing this registers all of them, which loaded programs may call by name.

One module for each kind of call, with the implementations for CPU, CUDA, fake tensors and autograd.
"""

from tfla_tk.ops import delta_rule, linear, mlstm, mlstm_decode, recurrent

__all__ = ["delta_rule", "linear", "mlstm", "mlstm_decode", "recurrent"]
