"""What is compiled: launchers, the host halves of kernels, and instances, kernels in machine code.

A launcher has the launches of its kernels for all head dims and dtypes. An instance is one cubin: the few
kernels that a call launches together, for one tile and one dtype.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tfla_tk.build.errors import BuildError
from tfla_tk.core import layout

# (K tile, V slice of one CTA); smaller head dims are padded to the tile, larger V takes several CTAs
MLSTM_TILES = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 64), (256, 128))
WALK_TILES = MLSTM_TILES  # of keys and values of the backward's walks; slices of 256 are dv's
# tiles of the forward that come without the overlap of its GEMMs, too, to measure what that gains
SEQUENTIAL_TILES = ((128, 256), (256, 128))
MAX_DIM_QK, MAX_DIM_V = 256, 512
GRADIENTS_TILES = (64, 128)  # of both head dims of the backward in one walk
MAX_NARROW = max(GRADIENTS_TILES)
DELTA_TILES = (64, 128, 256)  # K of the delta rule
GLA_TILES = (64, 128)  # K of gated linear attention, of one launch
GLA_STATES_TILES = (64, 128, 256)  # V of its backward's walks for dq, dk and dg
KDA_TILES = (64, 128)  # K of KDA
# head dims of keys of the other operators token by token, and tokens for which a state is read once
RECURRENT_KEYS = (64, 96, 128, 256)
RECURRENT_TOKENS = 4
# tokens of one call of mLSTM's decoding with several
SEQUENCE_TILES = (8, 16)
MAX_TOKENS = max(SEQUENCE_TILES)

_DTYPES = {False: "bf16", True: "fp16"}  # by whether operands are fp16
_TYPES = {False: "kittens::bf16", True: "kittens::half"}
_STATE_TYPES = {"fp32": "float", "bf16": "__nv_bfloat16", "fp16": "__half"}


_EVERY = ("CHUNK", "DTYPES", "ADDRESS_BITS")  # what all launchers tell


@dataclass(frozen=True)
class Launcher:
    """The host half of some kernels."""

    name: str  # of the library, for instance ``delta_rule``
    source: str  # its file below ``kernels/``
    defines: tuple[tuple[str, str], ...] = ()  # macros and their values
    exports: tuple[str, ...] = _EVERY  # what it tells that ``EXPECTED`` has, too

    def __hash__(self) -> int:
        return hash(self.name)  # of all fields it would take longer than what it is looked up for


@dataclass(frozen=True)
class Instance:
    """The machine code of some kernels."""

    name: str  # of the cubin, for instance ``delta_forward_k128_w2_bf16``
    launcher: Launcher  # who launches them; others may, too
    header: str  # the file that defines them, below ``kernels/``
    kernels: tuple[str, ...]  # their names in C++, within the namespace
    namespace: str  # below ``tfla_tk``
    # "bf16" or "fp16" of their operands, of decoding those of the state; "" where they serve all
    dtype: str = ""

    def __hash__(self) -> int:
        return hash(self.name)


_SCALAR_GATE = "scalar_gate/launcher.cu"
_OF_SCALAR_GATE = (*_EVERY, "ANCHOR_CHUNKS", "GRADIENTS", "GATE_KINDS", "STATE_CHUNKS", "FLOW_PARTS")
# the chunkwise kernels of mLSTM; a scalar decay takes those without normaliser
CHUNKWISE = Launcher("mlstm", _SCALAR_GATE, (), _OF_SCALAR_GATE)
SEQUENTIAL = Launcher("sequential", _SCALAR_GATE, (("TFLA_SEQUENTIAL", "1"),), _OF_SCALAR_GATE)
_OF_DECODING = (*_EVERY, "DECODE_TOKENS", "MAX_KEYS", "MAX_TOKENS", "MAX_SLICES")
DECODING = Launcher("decoding", "decode/launcher.cu", (), _OF_DECODING)
# the launcher of the delta rule also launches the kernels that make a scalar decay's gradient
_OF_DELTA_RULE = (
    *(*_EVERY, "SEGMENT_CHUNKS", "DELTA_ANCHOR_CHUNKS", "ANCHOR_CHUNKS", "GATE_KINDS"),
    *("DELTA_SLICE_COLUMNS", "DELTA_DECAY_CHUNKS", "DELTA_KEYS_WARPS"),
)
DELTA_RULE = Launcher("delta_rule", "delta_rule/launcher.cu", (), _OF_DELTA_RULE)
GLA = Launcher("gla", "channel_gate/launcher.cu", (), (*_EVERY, "ANCHOR_CHUNKS"))
KDA = Launcher("kda", "kda/launcher.cu")


@functools.cache
def tile_of(dim: int, tiles: tuple[int, ...]) -> int:
    """The smallest tile that holds a head dim; ValueError where none does."""
    if not 0 < dim <= max(tiles):
        raise ValueError(f"head dim: expected at most {max(tiles)}, got {dim}")
    return min(tile for tile in tiles if tile >= dim)


@functools.cache
def mlstm_tile(dim_qk: int, dim_v: int) -> tuple[int, int]:
    """The tile of K and the slice of V of the forward, the smallest that hold the head dims, else
    ValueError."""
    if not (0 < dim_qk <= MAX_DIM_QK and 0 < dim_v <= MAX_DIM_V):
        raise ValueError(f"head dims: expected at most {MAX_DIM_QK}/{MAX_DIM_V}, got {dim_qk}/{dim_v}")
    tile_qk = min(qk for qk, _ in MLSTM_TILES if qk >= dim_qk)
    slices = [v for qk, v in MLSTM_TILES if qk == tile_qk]
    return tile_qk, min((v for v in slices if v >= dim_v), default=max(slices))


@functools.cache
def walk_tile(gradient: str, dim_keys: int, dim_values: int) -> tuple[int, int]:
    """The tile of the keys and the slice of the values of the backward's walk for "dq", "dk" or "dv": the
    smallest that hold its operands, keys of up to MAX_DIM_QK columns (else ValueError), else the largest
    slice."""
    if not (0 < dim_keys <= MAX_DIM_QK and dim_values > 0):
        raise ValueError(f"columns: expected keys of at most {MAX_DIM_QK}, got {dim_keys}/{dim_values}")
    tile = min(keys for keys, _ in WALK_TILES if keys >= dim_keys)
    slices = [v for keys, v in WALK_TILES if keys == tile and (gradient == "dv" or v < 256)]
    return tile, min((v for v in slices if v >= dim_values), default=max(slices))


def makes_gradients(gradients: str, tile: tuple[int, int]) -> bool:
    """Whether a walk with a tile of `walk_tile` makes "dv", or "dq and dk". Where both head dims are narrow
    another walk makes them."""
    keys, slice_ = tile
    least = MAX_NARROW + 1 if gradients == "dv" else MAX_NARROW
    return keys > MAX_NARROW or slice_ >= least


# by the name of a launcher: what the names of its instances begin with, where its headers lie, the namespace
_FAMILIES = {
    "mlstm": ("mlstm", "scalar_gate", "mlstm"),
    "sequential": ("sequential", "scalar_gate", "mlstm"),
    "delta_rule": ("delta", "delta_rule", "delta_rule"),
    "gla": ("gla", "channel_gate", "channel_gate"),
    "kda": ("kda", "kda", "kda"),
}


def _instance(
    launcher: Launcher, name: str, header: str, kernels: Iterable[str], half: bool | None = None
) -> Instance:
    """Kernels of a launcher's family. half: their operands are fp16; None: they serve all dtypes."""
    family, folder, namespace = _FAMILIES[launcher.name]
    dtype = "" if half is None else _DTYPES[half]
    name = "_".join(filter(None, (family, name, dtype)))
    return Instance(name, launcher, f"{folder}/{header}", tuple(kernels), namespace, dtype)


def _cpp(flag: bool) -> str:
    return "true" if flag else "false"


def _of_tile(name: str, tile: tuple[int, int], normalize: bool = True) -> str:
    """A name of kernels for one tile; of those that could have a normaliser it tells where they have none."""
    return f"{name}_k{tile[0]}_v{tile[1]}{'' if normalize else '_unnormalized'}"


def mlstm_fwd(
    tile: tuple[int, int],
    half: bool,
    normalize: bool = True,
    sigmoid_gate: bool = False,
    sequential: bool = False,
) -> Instance:
    """The forward of mLSTM; without normalize also of a scalar decay. tile: of `mlstm_tile`. half: operands
    are fp16, here and below. sequential: a kernel that waits for every GEMM before its next step."""
    (tile_qk, slice_v), launcher = tile, SEQUENTIAL if sequential else CHUNKWISE
    of_tile = f"{_TYPES[half]}, {tile_qk}, {slice_v}, {_cpp(normalize)}"
    name = _of_tile("fwd", tile, normalize)
    if tile_qk < 256:
        kernel = f"mlstm_fwd_kernel<Config<{of_tile}>>"
        return _instance(launcher, name, "forward/narrow/kernel.cuh", [kernel], half)
    stabilised = normalize and not sigmoid_gate
    if normalize:
        name += "_sig" if sigmoid_gate else "_exp"
    kernel = f"mlstm_transposed_kernel<TransposedConfig<{of_tile}, {_cpp(stabilised)}>>"
    return _instance(launcher, name, "forward/transposed/kernel.cuh", [kernel], half)


def mlstm_fwd_states(tile: tuple[int, int], half: bool) -> Instance:
    """What sums up the states at the start of the forward's segments, where sequences are cut."""
    kernel = f"mlstm_states_kernel<StatesConfig<{_TYPES[half]}, {tile[0]}, {tile[1]}>>"
    return _instance(CHUNKWISE, _of_tile("fwd_states", tile), "forward/segment_sums.cuh", [kernel], half)


def mlstm_fwd_combine() -> Instance:
    """What carries these states from segment to segment."""
    return _instance(CHUNKWISE, "fwd_combine", "forward/carry.cuh", ["mlstm_combine_kernel"])


def mlstm_bwd_gates(sigmoid_gate: bool = False, decay: bool = False) -> Instance:
    """The gates of every chunk before the backward's walks, and the gradients of the gates after them."""
    gate, policy = ("sig", "SigmoidInput") if sigmoid_gate else ("exp", "ExponentialInput")
    if decay:
        gate, policy = "decay", "ScalarDecay"
    of_gate = [f"mlstm_{name}_kernel<{policy}>" for name in ("bwd_scan", "bwd_gates", "gate_gradients")]
    kernels = [*of_gate, "mlstm_bwd_flows_kernel"]
    return _instance(CHUNKWISE, f"bwd_gates_{gate}", "backward/gates.cuh", kernels)


def mlstm_gradients(tile: int, half: bool, normalize: bool = True, sums: bool = True) -> Instance:
    """The walk that makes dq, dk and dv at once; with sums, as always with normalize, it leaves those for the
    gates' gradients, too. The tile, one of GRADIENTS_TILES, is of both head dims."""
    name = _of_tile(f"gradients{'_and_sums' if sums else ''}", (tile, tile), normalize)
    config = f"GradientsConfig<{_TYPES[half]}, {tile}, {_cpp(normalize)}, {_cpp(sums)}>"
    kernel = f"mlstm_gradients_kernel<{config}>"
    return _instance(CHUNKWISE, name, "backward/gradients/kernel.cuh", [kernel], half)


def mlstm_bwd_rows(half: bool) -> Instance:
    """The terms of every row that the normaliser brings."""
    pair = "__half2" if half else "__nv_bfloat162"
    kernels = [f"mlstm_bwd_rows_kernel<{pair}, {lanes}>" for lanes in (8, 16, 32)]
    kernels.append("mlstm_bwd_factors_kernel")
    return _instance(CHUNKWISE, "bwd_rows", "backward/row_terms.cuh", kernels, half)


def mlstm_bwd_combine() -> Instance:
    """What carries states over the boundaries of the backward's segments."""
    return _instance(CHUNKWISE, "bwd_combine", "backward/carry.cuh", ["mlstm_bwd_combine_kernel"])


def mlstm_walk(gradients: str, tile: tuple[int, int], half: bool, normalize: bool = True) -> Instance:
    """Walks of the backward, of a tile of `walk_tile`: for "dv", or "dq and dk", which share one."""
    of_dv = gradients == "dv"  # it reads no normaliser
    name = _of_tile(f"walk_{gradients.replace(' and ', '_')}", tile, normalize or of_dv)
    kernels = _of_walks("mlstm_pass_kernel", gradients, tile, half, normalize and not of_dv)
    return _instance(CHUNKWISE, name, "backward/walk/kernel.cuh", kernels, half)


def mlstm_walk_segments(tile: tuple[int, int], half: bool) -> Instance:
    """What sums up the states at the start of the segments of the walks for dq and dk, and their gradients
    at the end of the segments of one walk."""
    gradients = "dq and dk" if makes_gradients("dq and dk", tile) else "dk"
    name = _of_tile(f"segments_{gradients.replace(' and ', '_')}", tile)
    kernels = _of_walks("mlstm_pass_segments_kernel", gradients, tile, half, True)
    return _instance(CHUNKWISE, name, "backward/walk/segment_sums.cuh", kernels, half)


def _of_walks(kernel: str, gradients: str, tile: tuple[int, int], half: bool, normalize: bool) -> list[str]:
    config = f"PassConfig<{_TYPES[half]}, {tile[0]}, {tile[1]}, Gradient::%s, {_cpp(normalize)}>"
    return [f"{kernel}<{config % gradient}>" for gradient in gradients.split(" and ")]


def _of_decoding(name: str, header: str, kernels: Iterable[str], dtypes: Iterable[str]) -> Instance:
    """Kernels of decoding; their dtype is that of 16 bits among those of the states, if there is one."""
    dtype = next((dtype for dtype in dtypes if dtype != "fp32"), "")
    return Instance(name, DECODING, f"decode/{header}", tuple(kernels), "decode", dtype)


@functools.cache
def mlstm_step(before: str, after: str) -> Instance:
    """One token of mLSTM, for all head dims. before, after: dtypes of C before and after, "fp32", "bf16",
    "fp16"; equal, or one of them "fp32"."""
    types = f"{_STATE_TYPES[before]}, {_STATE_TYPES[after]}"
    widest = 4 if "fp32" in (before, after) else 8
    kernels = [f"mlstm_step_kernel<{types}, {width}>" for width in (widest, 1)]
    return _of_decoding(f"mlstm_step_{before}_{after}", "mlstm/step.cuh", kernels, (before, after))


@functools.cache
def mlstm_sequence(tokens: int, before: str, after: str, fp32: bool) -> Instance:
    """A few tokens of mLSTM, for all head dims, by the smallest tile that holds them; ValueError for more
    than MAX_TOKENS, or none. before, after: as of `mlstm_step`. fp32: q, k and v are."""
    if not 0 < tokens <= MAX_TOKENS:
        raise ValueError(f"tokens: expected 1 to {MAX_TOKENS}, got {tokens}")
    tile = tile_of(tokens, SEQUENCE_TILES)
    of = f"{_STATE_TYPES[before]}, {_STATE_TYPES[after]}, {tile}, {_cpp(fp32)}"
    kernels = [f"mlstm_sequence_kernel<SequenceConfig<{of}, {_cpp(vector)}>>" for vector in (True, False)]
    name = f"mlstm_sequence_t{tile}_{before}_{after}{'_of_fp32' if fp32 else ''}"
    return _of_decoding(name, "mlstm/sequence.cuh", kernels, (before, after))


@functools.cache
def recurrent(state: str, v_first: bool, by_channel: bool, delta_rule: bool, dim_k: int) -> Instance:
    """One token, and a few, of the operators in [B, T, H, D]. state: its dtype, "fp32", "bf16" or "fp16".
    v_first: it is [V, K]. by_channel: the decay is per key channel. dim_k: one of RECURRENT_KEYS."""
    layout, decay = "v_first" if v_first else "k_first", "channel" if by_channel else "scalar"
    write = "delta" if delta_rule else "plain"
    of = f"Layout::{layout}, {_STATE_TYPES[state]}, Decay::{decay}, Write::{write}, {dim_k}"
    kernels = [f"decode_kernel<Config<{of}, {tokens}>>" for tokens in (1, RECURRENT_TOKENS)]
    name = f"recurrent_{layout}_{decay}_{write}_k{dim_k}_{state}"
    return _of_decoding(name, "kernel.cuh", kernels, (state,))


def recurrent_keys(by_channel: bool, delta_rule: bool) -> tuple[int, ...]:
    """The K that these take: of KDA, which has both, those of its models."""
    return (64, 128) if by_channel and delta_rule else RECURRENT_KEYS


def recurrent_columns(dim_k: int, v_first: bool) -> int:
    """The columns of V that these take together: V is a multiple."""
    return {64: 64, 256: 16}.get(dim_k, 32) if v_first else 32


# Of the delta rule, GLA and KDA: what the name of an instance says behind its family's, the header, and the
# kernels. {x} is an argument of `kernel_of`, {_x} the name of one that is true, {type} that of operands. A
# tile is of K unless it says otherwise, walkers are those of a CTA, 1 or 2
# fmt: off
_KERNELS: dict[str, tuple[str, ...]] = {
    # the chunk matrices; with scores P is made, too
    "delta_matrices": ("matrices_k{tile}{_scores}", "chunk_matrices/kernel.cuh",
                       "delta_matrices_kernel<{type}, {tile}, {scores}>"),
    # the walk of the forward: with matrices that are given, that makers beside it make, or the walk itself,
    # which takes two walkers and a tile of 128
    "delta_forward": ("forward_k{tile}_w{walkers}", "forward/kernel.cuh",
                      "delta_forward_kernel<ForwardConfig<{type}, {tile}, {walkers}>>"),
    "delta_forward_makers": (
        "forward_k{tile}_w{walkers}_makers", "forward/kernel.cuh",
        "delta_forward_with_makers_kernel<ForwardConfig<{type}, {tile}, {walkers}, kWarpgroupsOfMakers>>"),
    "delta_forward_in_walk": ("forward_k{tile}_w{walkers}_in_walk", "forward/kernel.cuh",
                              "delta_forward_kernel<ForwardConfig<{type}, {tile}, {walkers}, 0, true>>"),
    # how early the walks of a split's segments begin; what each segment makes of the state; what carries
    # states over the segments, for the backward, too
    "delta_leads": ("leads", "split/leads.cuh", "delta_leads_kernel"),
    "delta_maps": ("maps_k{tile}", "split/maps.cuh", "delta_maps_kernel<MapsConfig<{type}, {tile}>>"),
    "delta_carry": ("carry", "split/carry.cuh", "delta_carry_kernel"),
    # what makes the inputs of raw ones, and the gradients of these
    "delta_inputs": ("inputs_k{tile}", "inputs/forward.cuh", "delta_inputs_kernel<{type}, {tile}>"),
    "delta_inputs_backward": ("inputs_backward_k{tile}", "inputs/backward.cuh",
                              "delta_inputs_backward_kernel<{type}, {tile}>"),
    # the mirror walk of the backward: with a tile of up to 128 it leaves states alone
    "delta_mirror": ("mirror_k{tile}_w{walkers}", "backward/kernel.cuh",
                     "delta_mirror_kernel<MirrorConfig<{type}, {tile}, {walkers}>>"),
    # the walk that makes dq, dk and dv at once, K up to 128; with sums it leaves those for the gradient of
    # the log decay, too, which "delta_decay" makes of them
    "delta_gradients": ("gradients{_and_sums}", "backward/gradients/kernel.cuh",
                        "delta_gradients_kernel<GradientsConfig<{type}, {and_sums}>>"),
    "delta_decay": ("decay", "backward/gradients/decay.cuh", "delta_decay_kernel"),
    # dbeta of sums over V; what adds up parts of dq and dk
    "delta_strength": ("strength", "backward/strength.cuh", "delta_strength_kernel"),
    "delta_combine": ("combine", "backward/combine.cuh", "delta_combine_kernel<{type}>"),
    # the walks of the backward over the states, K of more than 128
    "delta_left": ("left", "backward/states/kernel.cuh",
                   "delta_states_kernel<StatesConfig<{type}, StateWalk::left>>"),
    "delta_right": ("right", "backward/states/kernel.cuh",
                    "delta_states_kernel<StatesConfig<{type}, StateWalk::right>>"),
    # the walk of the forward, and its mirror. makers: CTAs of a cluster that take turns at making the
    # operands: 1, or as pairs 2, with two walkers
    "gla_forward": ("forward_k{tile}_w{walkers}{_pairs}", "forward/kernel.cuh",
                    "gla_walk_kernel<ForwardConfig<{type}, {tile}, {walkers}, {makers}>>"),
    "gla_mirror": ("mirror_k{tile}_w{walkers}{_pairs}", "forward/kernel.cuh",
                   "gla_walk_kernel<MirrorConfig<{type}, {tile}, {walkers}, {makers}>>"),
    # the walks of the backward over the states; a tile is of V, with 256 there are two walkers always
    "gla_left": ("left_v{tile}_w{walkers}", "backward/states/kernel.cuh",
                 "gla_states_kernel<StatesConfig<{type}, {tile}, {walkers}, StateWalk::left>>"),
    "gla_right": ("right_v{tile}_w{walkers}", "backward/states/kernel.cuh",
                  "gla_states_kernel<StatesConfig<{type}, {tile}, {walkers}, StateWalk::right>>"),
    # the states at the borders between segments, or their gradients; a tile is of V
    "gla_segments": ("segments_v{tile}{_backward}", "segments/kernels.cuh",
                     "gla_sums_kernel<SumsConfig<{type}, {tile}, {backward}>>",
                     "gla_carry_kernel<{backward}>"),
    # what makes the chunk matrices and all that the walk reads of q, k, g and beta; the walk of the forward;
    # its mirror, in the backward; what makes the gradients, of all chunks in parallel
    "kda_matrices": ("matrices_k{tile}", "matrices/kernel.cuh", "kda_matrices_kernel<{type}, {tile}>"),
    "kda_forward": ("forward_k{tile}_w{walkers}", "forward/kernel.cuh",
                    "kda_forward_kernel<ForwardConfig<{type}, {tile}, {walkers}>>"),
    "kda_mirror": ("mirror_k{tile}_w{walkers}", "backward/kernel.cuh",
                   "kda_mirror_kernel<MirrorConfig<{type}, {tile}, {walkers}>>"),
    "kda_gradients": ("gradients_k{tile}", "gradients/kernel.cuh", "kda_gradients_kernel<{type}, {tile}>"),
}
# fmt: on


def kernel_of(name: str, half: bool | None = None, **of: int) -> Instance:
    """A kernel of the table. half: as of `_instance`."""
    launcher = {"delta": DELTA_RULE, "gla": GLA, "kda": KDA}[name.partition("_")[0]]
    words: dict[str, object] = {} if half is None else {"type": _TYPES[half]}
    for key, value in of.items():
        words[key] = _cpp(value) if isinstance(value, bool) else value
        words[f"_{key}"] = f"_{key}" if value else ""
    told, header, *kernels = _KERNELS[name]
    return _instance(launcher, told.format(**words), header, [x.format(**words) for x in kernels], half)


def gla_walk(which: str, tile: int, half: bool, walkers: int, makers: int) -> Instance:
    """GLA's "forward", or its "mirror" in the backward."""
    return kernel_of(f"gla_{which}", half, tile=tile, walkers=walkers, makers=makers, pairs=makers == 2)


def all_instances() -> list[Instance]:
    """The shipped ones, and the forward of mLSTM without overlap."""
    sequential = itertools.product(SEQUENTIAL_TILES, (False, True))
    return [*shipped_instances(), *(mlstm_fwd(*of, sequential=True) for of in sequential)]


@functools.cache
def shipped_instances() -> tuple[Instance, ...]:
    """Every instance that a call takes."""
    halves = False, True
    found: list[Instance] = []
    for of_half in (_scalar_gate_instances, _delta_instances, _gla_instances, _kda_instances):
        found += itertools.chain(*map(of_half, halves))
    found += [mlstm_fwd_combine(), mlstm_bwd_combine()]
    found += [mlstm_bwd_gates(), mlstm_bwd_gates(sigmoid_gate=True), mlstm_bwd_gates(decay=True)]
    found += map(kernel_of, ("delta_leads", "delta_carry", "delta_strength", "delta_decay"))
    found += [mlstm_step(*states) for states in _STATES]
    of_sequences = itertools.product(SEQUENCE_TILES, _STATES, halves)
    found += [mlstm_sequence(tokens, *states, fp32) for tokens, states, fp32 in of_sequences]
    for by_channel, delta_rule in itertools.product(halves, halves):
        of_steps = itertools.product(_STATE_TYPES, halves, recurrent_keys(by_channel, delta_rule))
        found += [recurrent(state, v_first, by_channel, delta_rule, k) for state, v_first, k in of_steps]
    return tuple(found)


# dtypes of a state before and after decoding
_STATES = (
    ("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp32"),
    ("fp16", "fp16"), ("fp32", "fp16"), ("fp16", "fp32"),
)  # fmt: skip


def shipped_launchers() -> list[Launcher]:
    """Every launcher that a call takes."""
    return list(dict.fromkeys(instance.launcher for instance in shipped_instances()))


def _scalar_gate_instances(half: bool) -> Iterator[Instance]:
    for tile in MLSTM_TILES:
        yield mlstm_fwd_states(tile, half)
        yield from (mlstm_fwd(tile, half, normalize) for normalize in (True, False))
        if tile[0] == 256:
            yield mlstm_fwd(tile, half, sigmoid_gate=True)
    for tile in WALK_TILES:
        if tile[1] < 256:
            yield mlstm_walk_segments(tile, half)
        for gradients, normalize in (("dv", True), ("dq and dk", True), ("dq and dk", False)):
            if makes_gradients(gradients, tile) and (gradients == "dv" or tile[1] < 256):
                yield mlstm_walk(gradients, tile, half, normalize)
    for of_both in GRADIENTS_TILES:
        kinds = (True, True), (False, True), (False, False)
        yield from (mlstm_gradients(of_both, half, normalize, sums) for normalize, sums in kinds)
    yield mlstm_bwd_rows(half)


def _delta_instances(half: bool) -> Iterator[Instance]:
    of = functools.partial(kernel_of, half=half)
    for tile in DELTA_TILES:
        # as matrices_before in backends/tk/delta_rule/split.py: who makes P
        makes_scores = {64: (False,), 256: (True,)}.get(tile, (False, True))
        yield from (of("delta_matrices", tile=tile, scores=scores) for scores in makes_scores)
        yield from (of("delta_forward", tile=tile, walkers=walkers) for walkers in (1, 2))
        for walkers in (2,) if tile <= 128 else (1, 2):
            yield of("delta_mirror", tile=tile, walkers=walkers)
        yield from (of(name, tile=tile) for name in ("delta_inputs", "delta_inputs_backward"))
        if tile <= 128:
            yield from (of("delta_forward_makers", tile=tile, walkers=walkers) for walkers in (1, 2))
            yield of("delta_maps", tile=tile)
    yield of("delta_forward_in_walk", tile=128, walkers=2)
    yield from (of("delta_gradients", and_sums=sums) for sums in (False, True))
    yield from map(of, ("delta_combine", "delta_left", "delta_right"))


def _gla_instances(half: bool) -> Iterator[Instance]:
    for which, tile in itertools.product(("forward", "mirror"), GLA_TILES):
        yield from (gla_walk(which, tile, half, *of) for of in ((1, 1), (2, 1), (2, 2)))
    for walk, tile in itertools.product(("gla_left", "gla_right"), GLA_STATES_TILES):
        for walkers in (2,) if tile == 256 else (1, 2):
            yield kernel_of(walk, half, tile=tile, walkers=walkers)
    for tile, backward in itertools.product((64, 128), (False, True)):
        yield kernel_of("gla_segments", half, tile=tile, backward=backward)


def _kda_instances(half: bool) -> Iterator[Instance]:
    for tile in KDA_TILES:
        yield from (kernel_of(name, half, tile=tile) for name in ("kda_matrices", "kda_gradients"))
        for name, walkers in itertools.product(("kda_forward", "kda_mirror"), (1, 2)):
            yield kernel_of(name, half, tile=tile, walkers=walkers)


# What Python and the kernels must agree on: what a launcher tells of it is compared when it is loaded
_OF_LAYOUT = (
    *("CHUNK", "ANCHOR_CHUNKS", "STATE_CHUNKS", "FLOW_PARTS", "DELTA_ANCHOR_CHUNKS", "SEGMENT_CHUNKS"),
    *("DELTA_SLICE_COLUMNS", "DELTA_DECAY_CHUNKS", "DELTA_KEYS_WARPS", "GRADIENTS", "GATE_KINDS"),
    *("ADDRESS_BITS", "MAX_SLICES"),
)
EXPECTED: dict[str, Any] = {
    **{name: getattr(layout, name) for name in _OF_LAYOUT},
    "DTYPES": {str(dtype).removeprefix("torch."): code for dtype, code in layout.DTYPES.items()},
    "MAX_KEYS": MAX_DIM_QK,
    "MAX_TOKENS": MAX_TOKENS,
    "DECODE_TOKENS": RECURRENT_TOKENS,
}


def check_exports(launcher: Launcher, found: dict[str, Any]) -> None:
    """Compare the constants that a launcher tells with what Python takes for them."""
    for name in launcher.exports:
        value = found.get(name, "nothing")
        if value != EXPECTED[name]:
            raise BuildError(
                f"{launcher.name}: the kernels have {name} = {value}, the Python package {EXPECTED[name]}",
                "reinstall tfla_tk, so that both are of one version",
            )
