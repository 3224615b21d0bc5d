"""tfla_tk: chunkwise linear attention on Hopper GPUs, written with ThunderKittens.

Importing this package touches no GPU and compiles nothing. Public names:

    mlstm_chunkwise, mlstm_siging_chunkwise    mLSTM with exponential and with sigmoid input gate
    mlstm_step, mlstm_siging_step              one token of them, for decoding
    mlstm_sequence, mlstm_siging_sequence      a few tokens of them, for decoding
    chunk_simple_gla                           linear attention with a decay per token and head, or per head
    chunk_retention, chunk_lightning_attn      the same with the decays of RetNet and of Lightning Attention
    chunk_gla                                  linear attention with a decay per token, head and key channel
    chunk_delta_rule, chunk_gated_delta_rule   DeltaNet; gated DeltaNet, with a decay per token and head
    chunk_kda                                  KDA, the delta rule with a decay per key channel
    fused_recurrent_gla, fused_recurrent_simple_gla, fused_recurrent_retention,
    fused_recurrent_delta_rule, fused_recurrent_gated_delta_rule, fused_recurrent_kda
                                               the same token by token, for decoding
    batch_invariant, is_batch_invariant        an option: results of a sequence do not depend on its batch
    which                                      the backend that a call would use, and why
    __version__                                the version of this package
    UnsupportedError                           a backend asked for by name cannot serve the call

Imported by name: tfla_tk.integrations.xlstm puts the kernels into xLSTM models, tfla_tk.integrations.fla into
models that call FLA's functions, tfla_tk.serving has the calls of vLLM and SGLang, tfla_tk.reference every
operator in pure PyTorch.
"""

from tfla_tk import _first as _first
from tfla_tk import ops as ops
from tfla_tk.core.dispatch import which
from tfla_tk.core.errors import UnsupportedError
from tfla_tk.core.invariance import batch_invariant, is_batch_invariant
from tfla_tk.core.support import Choice, Support
from tfla_tk.decode import mlstm_sequence, mlstm_siging_sequence, mlstm_siging_step, mlstm_step
from tfla_tk.delta_rule import chunk_delta_rule, chunk_gated_delta_rule, chunk_kda
from tfla_tk.mlstm import mlstm_chunkwise, mlstm_siging_chunkwise
from tfla_tk.recurrent import (
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gla,
    fused_recurrent_kda,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
)
from tfla_tk.simple_gla import chunk_gla, chunk_lightning_attn, chunk_retention, chunk_simple_gla

__version__ = "0.1.0"  # pyproject.toml reads it from here

__all__ = [
    "Choice",
    "Support",
    "UnsupportedError",
    "__version__",
    "batch_invariant",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
    "is_batch_invariant",
    "mlstm_chunkwise",
    "mlstm_sequence",
    "mlstm_siging_chunkwise",
    "mlstm_siging_sequence",
    "mlstm_siging_step",
    "mlstm_step",
    "which",
]
