"""Small faults, each of which some tests should notice.

A reduction of the code or of the tests loses nothing if those that were noticed before are noticed after.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A text of a file that is replaced.

    None should make a kernel wait for ever: the GPU would be held until the limit.

    Attributes:
        text: occurs exactly once in the file; where it does not, the fault is gone.
        tests: arguments of pytest, as in a shell: the tests that should notice.
        instance: a kernel with the text that these tests take, by its name; empty: they need no GPU, since
            the fault is in Python, or in a kernel that runs on a CPU there.
    """

    name: str
    file: str
    text: str
    replacement: str
    tests: str
    instance: str = ""


_GPU = "tests/gpu/test_"

# fmt: off
KERNELS = (
    Fault("row behind a packed tail", "kernels/common/tile_loader.cuh",
          "zero_rows(tile, rows);", "zero_rows(tile, rows + 1);",
          f"{_GPU}scalar_decay.py::test_packed_sequences -k 'int32 and 1000'",
          "mlstm_gradients_and_sums_k128_v128_unnormalized_bf16"),
    Fault("no fence before GEMMs and TMA", "kernels/common/sync.cuh",
          'asm volatile("fence.proxy.async.shared::cta;\\n" ::: "memory");', "",
          f"{_GPU}mlstm.py::test_lengths {_GPU}delta_rule.py::test_any_length "
          "-k 'bf16 and (exp and 128_128 or 64_128 and 1000)'",
          "mlstm_gradients_and_sums_k128_v128_bf16"),
    Fault("swizzle of a panel", "kernels/common/tiles.cuh",
          "((unit ^ (row % 8)) * 16)", "((unit ^ (row % 4)) * 16)",
          f"{_GPU}mlstm.py::test_native_head_dims -k 'exp and bf16 and 128_128'",
          "mlstm_fwd_k128_v128_bf16"),
    Fault("last segment of a packed sequence", "kernels/sequence/segments.cuh",
          "max((tokens + segment_tokens(cut) - 1) / segment_tokens(cut), 1)",
          "max(tokens / segment_tokens(cut), 1)",
          f"{_GPU}mlstm.py::test_packed_sequences -k 'plain and exp and bf16 and 2-128_128'",
          "mlstm_fwd_k128_v128_bf16"),
    Fault("factors of a carried state", "kernels/sequence/carry.cuh",
          "decay * x.z + weight * added[n].z", "weight * x.z + decay * added[n].z",
          f"{_GPU}mlstm.py::test_cut_sequences -k 'plain and exp and bf16 and 1-128_128'",
          "mlstm_fwd_combine"),
    Fault("normaliser of a lower row", "kernels/scalar_gate/forward/narrow/output.cuh",
          "intra.y + inter.y * qn_rows.y}", "intra.y + inter.x * qn_rows.y}",
          f"{_GPU}mlstm.py::test_native_head_dims -k 'exp and bf16 and 128_128'",
          "mlstm_fwd_k128_v128_bf16"),
    Fault("deferred decay of what a row reads", "kernels/scalar_gate/gate/gates.cuh",
          "scale * exp2f(rounded_sum(m, -row) + owed.log2)", "scale * exp2f(rounded_sum(m, -row))",
          f"{_GPU}scalar_decay.py::test_gates -k 'bf16 and 128_256'",
          "mlstm_fwd_k128_v256_unnormalized_bf16"),
    Fault("row of a factor, K = 256", "kernels/scalar_gate/forward/transposed/scores.cuh",
          "same_gates.inter[row + 8] * factor.y", "same_gates.inter[row] * factor.y",
          f"{_GPU}mlstm.py::test_native_head_dims -k 'exp and bf16 and 256_512'",
          "mlstm_fwd_k256_v128_exp_bf16"),
    Fault("decay of a state from the chunk before", "kernels/scalar_gate/backward/gradients/keys.cuh",
          "received.scale(decay);", "",
          f"{_GPU}mlstm.py::test_lengths -k 'exp and bf16 and 64_64'",
          "mlstm_gradients_and_sums_k64_v64_bf16"),
    Fault("flow from the chunk before, gates of the one walk",
          "kernels/scalar_gate/backward/gradients/gate_gradients.cuh",
          "flow - (from_before ? given.x + given.y : 0.f)", "flow",
          f"{_GPU}mlstm.py::test_lengths -k 'exp and bf16 and 64_64'",
          "mlstm_bwd_gates_exp"),
    Fault("decay of n in wide walks", "kernels/scalar_gate/backward/walk/state.cuh",
          "if constexpr (kNormalizer) norm.scale(decay);", "",
          f"{_GPU}mlstm.py::test_lengths -k 'exp and 256_512 and (129 or 1000)'",
          "mlstm_walk_dq_dk_k256_v128_bf16"),
    Fault("flow from the right, gates of wide walks", "kernels/scalar_gate/backward/gate_gradients.cuh",
          "right.through(flows[c].sent, flows[c].forgets).plus(flows[c].received)",
          "right.through(flows[c].sent, flows[c].forgets).plus(flows[c].sent)",
          f"{_GPU}mlstm_backward_gates.py::test_gate_gradients -k '513 and zeros'", "mlstm_bwd_gates_exp"),
    Fault("decay behind the last chunk, delta rule", "kernels/delta_rule/forward/walker.cuh",
          "chunk == chunks ? 1.f : decay", "decay",
          f"{_GPU}delta_rule.py::test_all_dims -k 'bf16 and states and chosen-128_128'",
          "delta_forward_k128_w2_bf16"),
    Fault("no wait for the reads, delta rule's one walk", "kernels/delta_rule/backward/gradients/keys.cuh",
          "wait(smem.reads_ready, step & 1);", "",
          f"{_GPU}delta_rule.py::test_all_dims -k 'bf16 and zeros and chosen-128_128'",
          "delta_gradients_and_sums_bf16"),
    Fault("factor of what the left walk adds, K > 128", "kernels/delta_rule/backward/states/left.cuh",
          "W::scale(scaled, keys, gates.update, 1.f);", "W::scale(scaled, keys, gates.read, 1.f);",
          f"{_GPU}delta_rule.py::test_all_dims -k 'bf16 and zeros and (256_64 or 192_256)'",
          "delta_left_bf16"),
    Fault("diagonal block of a triangular merge", "kernels/sequence/triangular_solve.cuh",
          "if (8 * step < column) continue;", "if (8 * step <= column) continue;",
          f"{_GPU}delta_rule.py::test_repeated_keys -k bf16",
          "delta_matrices_k64_bf16"),
    Fault("row of a carried map, delta rule's split", "kernels/delta_rule/split/carry.cuh",
          "add_scaled(sum[3], map[y].w, z)", "add_scaled(sum[3], map[y].z, z)",
          f"{_GPU}delta_split.py::test_gates -k 'carried and slow'", "delta_carry"),
    Fault("sum over value heads", "kernels/delta_rule/backward/combine.cuh",
          "n < s.group; n++", "n < s.group - 1; n++",
          f"{_GPU}delta_rule.py::test_value_heads -k 'bf16 and chosen-128_128'", "delta_combine_bf16"),
    Fault("gates of a packed tail, GLA", "kernels/channel_gate/middle.cuh",
          "if (tokens < kBlock)", "if (tokens <= 0)",
          f"{_GPU}gla.py::test_packed_sequences -k 'float32 and (128_128 or 64_64)'",
          "gla_forward_k128_w2_bf16"),
    Fault("decay of a segment's lower rows, GLA", "kernels/channel_gate/segments/sums.cuh",
          "decays[row + 8] = through.y;", "decays[row + 8] = through.x;",
          f"{_GPU}gla.py::test_long_sequences", "gla_segments_v128_bf16"),
    Fault("state seen by later groups of a block, GLA", "kernels/channel_gate/backward/states/gates.cuh",
          "x.through = x.through * through;", "",
          f"{_GPU}gla.py::test_any_length -k 'bf16 and 128_128'",
          "gla_left_v128_w2_bf16"),
)

PYTHON = (
    Fault("addresses of borders and their decays", "tfla_tk/backends/tk/channel_gate.py",
          "entering_at, borders_at, decays_at, scale", "entering_at, decays_at, borders_at, scale",
          "tests/cpu/kernels/test_calls.py -k 'cut and gla'"),
    Fault("slice of an operand", "tfla_tk/backends/tk/channel_gate.py",
          "x[0] + self.first * dtype.itemsize, *x[1:]", "x[0] + self.first, *x[1:]",
          "tests/cpu/kernels/test_calls.py -k 'test_results and gla'"),
    Fault("stride of dh in what a call is known by", "tfla_tk/backends/tk/scalar_gate/backward.py",
          "tensors.cu_seqlens, *tensors)", "tensors.cu_seqlens, *tensors._replace(dh=None))",
          "tests/cpu/kernels/test_calls.py -k 'gradients_that_lie_elsewhere'"),
    Fault("segments of packed sequences", "tfla_tk/backends/tk/segments.py",
          "return Cut(sequences + tokens // length, chunks)",
          "return Cut(tokens // length + 1, chunks)",
          "tests/cpu/kernels/test_segments.py"),
    Fault("sign of the erasures' gradient", "reference/delta_rule_backward.py",
          "of_reads, of_erasures = through * (do @ s.mT), -through * (dv @ s.mT)",
          "of_reads, of_erasures = through * (do @ s.mT), through * (dv @ s.mT)",
          "tests/cpu/reference/test_linear_backward.py"),
    Fault("refusal of forward-mode derivatives", "tfla_tk/core/dispatch.py",
          'if name != "reference" and call.forward_mode:', 'if name == "triton" and call.forward_mode:',
          "tests/cpu/api/test_transforms.py -k forward_mode"),
    Fault("flags of nvcc in the cache key", "tfla_tk/build/cache.py",
          "for variable in (env.NVCC_PREPEND_FLAGS, env.NVCC_APPEND_FLAGS)]",
          "for variable in (env.NVCC_APPEND_FLAGS,)]",
          "tests/cpu/build/test_cache.py -k key"),
    Fault("a build that failed is not tried again by the drop-in", "tfla_tk/integrations/fla.py",
          "key = None if compiling or error.failed else", "key = None if compiling else",
          "tests/cpu/integrations/test_fla_or_tk.py"),
    Fault("offsets on the CPU are not compared", "tfla_tk/simple_gla.py",
          "check_same_offsets(cu_seqlens, cu_seqlens_cpu)\n    "
          'return _path.serve(\n        "chunk_simple_gla"',
          'return _path.serve(\n        "chunk_simple_gla"',
          "tests/cpu/api/test_refusals.py -k 'packing or offsets'"),
    # kernels whose sources run on a CPU in their tests
    Fault("scale of a step's normaliser", "kernels/decode/mlstm/step.cuh",
          "normaliser(p.scale * d, ", "normaliser(d, ",
          "tests/cpu/kernels/test_mlstm_decoding.py -k 'head_dims and 255'"),
    Fault("stabiliser that enters a few tokens", "kernels/decode/mlstm/sequence_gates.cuh",
          "out.decay = power_of_two(entering + end);", "out.decay = power_of_two(end);",
          "tests/cpu/kernels/test_mlstm_decoding.py -k 'new_state and 5'"),
    Fault("sums of two tokens in one place", "kernels/decode/k_first.cuh",
          "u[2] : u[3]);\n            set ^= 1;", "u[2] : u[3]);",
          "tests/cpu/kernels/test_recurrent.py -k 'single_calls and False'"),
    Fault("row of the state that u belongs to", "kernels/decode/v_first.cuh",
          "lane - sub + r * kPerRow", "lane - sub + r",
          "tests/cpu/kernels/test_recurrent.py -k 'against_fp64 and gla'"),
    Fault("80th percentile of times", "bench/timing.py",
          "cuts[0], cuts[3], len(times)", "cuts[0], cuts[2], len(times)",
          "tests/cpu/bench/test_timing.py"),
)
# fmt: on
