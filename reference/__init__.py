"""Reference operators in plain PyTorch: every operator in recurrent, parallel and chunkwise form.

The recurrent form of each operator is its specification; the others equal it up to rounding. Everything is
differentiable by autograd and computed in the inputs' dtype, at least fp32.
"""

# ruff: noqa: F403, F405
from .delta_rule import *
from .delta_rule_backward import *
from .gla import *
from .linear import *
from .mlstm import *
from .mlstm_backward import *
from .mlstm_forward import *
from .simple_gla import *

__all__ = [
    "ChunkDecay",
    "DeltaRuleGrads",
    "LinearGrads",
    "LogDecayGrads",
    "MLSTMForward",
    "MLSTMGrads",
    "delta_log_decay",
    "delta_log_decay_backward",
    "delta_rule_chunkwise",
    "delta_rule_parallel",
    "delta_rule_recurrent",
    "gated_delta_rule_backward",
    "gated_delta_rule_chunkwise",
    "gated_delta_rule_parallel",
    "gated_delta_rule_recurrent",
    "gla_backward",
    "gla_chunkwise",
    "gla_parallel",
    "gla_recurrent",
    "kda_backward",
    "kda_chunkwise",
    "kda_parallel",
    "kda_recurrent",
    "kda_with_states",
    "l2_norm",
    "l2_norm_backward",
    "lightning_log_decay",
    "mlstm_backward",
    "mlstm_chunkwise",
    "mlstm_forward_terms",
    "mlstm_parallel",
    "mlstm_recurrent",
    "mlstm_siging_backward",
    "mlstm_siging_chunkwise",
    "mlstm_siging_parallel",
    "mlstm_siging_recurrent",
    "mlstm_siging_step",
    "mlstm_step",
    "retention_log_decay",
    "simple_gla_backward",
    "simple_gla_chunkwise",
    "simple_gla_parallel",
    "simple_gla_recurrent",
    "writing_strength",
    "writing_strength_backward",
]
