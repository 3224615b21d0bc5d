"""What is compiled: launchers, the host halves of kernels, and instances, kernels in machine code.

A launcher has the launches of its kernels for all head dims and dtypes. An instance is one cubin: the few
kernels that a call launches together, for one tile and one dtype.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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

_SCALAR_DECAY = (("TFLA_SCALAR_DECAY", "1"),)
_DTYPES = {False: "bf16", True: "fp16"}  # by whether operands are fp16
_TYPES = {False: "kittens::bf16", True: "kittens::half"}
_STATE_TYPES = {"fp32": "float", "bf16": "__nv_bfloat16", "fp16": "__half"}


_EVERY = ("CHUNK", "DTYPES", "ADDRESS_BITS")  # what all launchers tell


@dataclass(frozen=True)
class Launcher:
    """The host half of some kernels.

    Attributes:
        name: The library's name, for instance ``delta_forward``.
        source: The file of its launches below ``kernels/``.
        bindings: The file of the functions that Python calls, below ``kernels/``.
        defines: Macros and their values.
        exports: What it tells that ``exports.EXPECTED`` has, too.
    """

    name: str
    source: str
    bindings: str
    defines: tuple[tuple[str, str], ...] = ()
    exports: tuple[str, ...] = _EVERY

    def __hash__(self) -> int:
        return hash(self.name)  # of all fields it would take longer than what it is looked up for


@dataclass(frozen=True)
class Instance:
    """The machine code of some kernels.

    Attributes:
        name: The cubin's name, for instance ``delta_forward_k128_w2_bf16``.
        launcher: Who launches them. Others may, too.
        header: The file that defines them, below ``kernels/``.
        kernels: Their names in C++, within the namespace.
        namespace: Of the kernels, below ``tfla_tk``.
        dtype: "bf16" or "fp16" of their operands, of decoding those of the state; "" where they serve all.
    """

    name: str
    launcher: Launcher
    header: str
    kernels: tuple[str, ...]
    namespace: str
    dtype: str = ""

    def __hash__(self) -> int:
        return hash(self.name)


_SCALAR_GATE = ("scalar_gate/launcher.cu", "scalar_gate/bindings/launcher.cpp")
_OF_SCALAR_GATE = (*_EVERY, "ANCHOR_CHUNKS", "GRADIENTS", "STATE_CHUNKS", "FLOW_PARTS")
# the chunkwise kernels of mLSTM, and by True those with a scalar decay in the place of its gates
CHUNKWISE = {
    False: Launcher("mlstm", *_SCALAR_GATE, (), _OF_SCALAR_GATE),
    True: Launcher("decay", *_SCALAR_GATE, _SCALAR_DECAY, _OF_SCALAR_GATE),
}
SEQUENTIAL = Launcher("sequential", *_SCALAR_GATE, (("TFLA_SEQUENTIAL", "1"),), _OF_SCALAR_GATE)
_OF_DECODING = (*_EVERY, "DECODE_TOKENS", "MAX_KEYS", "MAX_TOKENS", "MAX_SLICES")
DECODING = Launcher("decoding", "decode/launcher.cu", "decode/launcher.cpp", (), _OF_DECODING)
# has the kernels of the gates' gradients, too, with a scalar decay
_DELTA_RULE = ("delta_rule/launcher.cu", "delta_rule/bindings/launcher.cpp")
_OF_DELTA_RULE = (
    *(*_EVERY, "SEGMENT_CHUNKS", "DELTA_ANCHOR_CHUNKS", "ANCHOR_CHUNKS"),
    *("DELTA_SLICE_COLUMNS", "DELTA_DECAY_CHUNKS", "DELTA_KEYS_WARPS"),
)
DELTA_RULE = Launcher("delta_rule", *_DELTA_RULE, _SCALAR_DECAY, _OF_DELTA_RULE)
_GLA = ("channel_gate/launcher.cu", "channel_gate/bindings/launcher.cpp")
GLA = Launcher("gla", *_GLA, (), (*_EVERY, "ANCHOR_CHUNKS"))
KDA = Launcher("kda", "kda/launcher.cu", "kda/bindings/launcher.cpp")


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
    "decay": ("decay", "scalar_gate", "mlstm"),
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


def _gate(sigmoid_gate: bool, decay: bool) -> tuple[str, str]:
    """A short name of the gates, and their policy in C++."""
    if decay:
        return "decay", "ScalarDecay"
    return ("sig", "SigmoidInput") if sigmoid_gate else ("exp", "ExponentialInput")


def _of_tile(name: str, tile: tuple[int, int], has_normaliser: bool) -> str:
    """A name of kernels for one tile; of those that could have a normaliser it tells where they have none."""
    return f"{name}_k{tile[0]}_v{tile[1]}{'' if has_normaliser else '_unnormalized'}"


def mlstm_fwd(
    tile: tuple[int, int],
    half: bool,
    normalize: bool = True,
    sigmoid_gate: bool = False,
    decay: bool = False,
    sequential: bool = False,
) -> Instance:
    """The forward of mLSTM, or with a scalar decay. tile: of `mlstm_tile`. half: operands are fp16, here
    and below. sequential: a kernel that waits for every GEMM before its next step."""
    (tile_qk, slice_v), launcher = tile, SEQUENTIAL if sequential else CHUNKWISE[decay]
    of_tile = f"{_TYPES[half]}, {tile_qk}, {slice_v}, {_cpp(normalize)}"
    name, suffix = _of_tile("fwd", tile, True), "" if normalize or decay else "_unnormalized"
    if tile_qk < 256:
        kernel = f"mlstm_fwd_kernel<Config<{of_tile}>>"
        return _instance(launcher, name + suffix, "forward/narrow/kernel.cuh", [kernel], half)
    gate, policy = _gate(sigmoid_gate, decay)
    kernel = f"mlstm_transposed_kernel<TransposedConfig<{of_tile}, {policy}>>"
    return _instance(launcher, f"{name}_{gate}{suffix}", "forward/transposed/kernel.cuh", [kernel], half)


def mlstm_fwd_states(
    tile: tuple[int, int], half: bool, normalize: bool = True, decay: bool = False
) -> Instance:
    """What sums up the states at the start of the forward's segments, where sequences are cut."""
    kernel = f"mlstm_states_kernel<StatesConfig<{_TYPES[half]}, {tile[0]}, {tile[1]}, {_cpp(normalize)}>>"
    name = _of_tile("fwd_states", tile, normalize or decay)
    return _instance(CHUNKWISE[decay], name, "forward/segment_sums.cuh", [kernel], half)


def mlstm_fwd_combine(decay: bool = False) -> Instance:
    """What carries these states from segment to segment."""
    kernels = [f"mlstm_combine_kernel<{_cpp(x)}>" for x in ((False,) if decay else (False, True))]
    return _instance(CHUNKWISE[decay], "fwd_combine", "forward/carry.cuh", kernels)


def mlstm_bwd_gates(sigmoid_gate: bool = False, decay: bool = False) -> Instance:
    """The gates of every chunk before the backward's walks, and the gradients of the gates after them."""
    gate, policy = _gate(sigmoid_gate, decay)
    of_gate = [f"mlstm_{name}_kernel<{policy}>" for name in ("bwd_scan", "bwd_gates", "gate_gradients")]
    name = "bwd_gates" if decay else f"bwd_gates_{gate}"
    kernels = [*of_gate, "mlstm_bwd_flows_kernel"]
    return _instance(CHUNKWISE[decay], name, "backward/gates.cuh", kernels)


def mlstm_gradients(
    tile: int, half: bool, normalize: bool = True, sums: bool = True, decay: bool = False
) -> Instance:
    """The walk that makes dq, dk and dv at once; with sums it leaves those for the gates' gradients, too.
    The tile, one of GRADIENTS_TILES, is of both head dims."""
    normalize = normalize and not decay
    name = _of_tile(f"gradients{'_and_sums' if sums else ''}", (tile, tile), normalize or decay)
    config = f"GradientsConfig<{_TYPES[half]}, {tile}, {_cpp(normalize)}, {_cpp(sums)}>"
    kernel = f"mlstm_gradients_kernel<{config}>"
    return _instance(CHUNKWISE[decay], name, "backward/gradients/kernel.cuh", [kernel], half)


def mlstm_bwd_rows(half: bool) -> Instance:
    """The terms of every row that the normaliser brings."""
    pair = "__half2" if half else "__nv_bfloat162"
    kernels = [f"mlstm_bwd_rows_kernel<{pair}, {lanes}>" for lanes in (8, 16, 32)]
    kernels.append("mlstm_bwd_factors_kernel")
    return _instance(CHUNKWISE[False], "bwd_rows", "backward/row_terms.cuh", kernels, half)


def mlstm_bwd_combine(decay: bool = False) -> Instance:
    """What carries states over the boundaries of the backward's segments."""
    return _instance(CHUNKWISE[decay], "bwd_combine", "backward/carry.cuh", ["mlstm_bwd_combine_kernel"])


def mlstm_walk(
    gradients: str, tile: tuple[int, int], half: bool, normalize: bool = True, decay: bool = False
) -> Instance:
    """Walks of the backward, of a tile of `walk_tile`: for "dv", or "dq and dk", which share one."""
    kernel, header = "mlstm_pass_kernel", "backward/walk/kernel.cuh"
    return _of_walks(kernel, "walk", header, gradients, tile, half, normalize, decay)


def mlstm_walk_segments(
    tile: tuple[int, int], half: bool, normalize: bool = True, decay: bool = False
) -> Instance:
    """What sums up the states at the start of the segments of the walks for dq and dk, and their gradients
    at the end of the segments of one walk."""
    gradients = "dq and dk" if makes_gradients("dq and dk", tile) else "dk"
    kernel, header = "mlstm_pass_segments_kernel", "backward/walk/segment_sums.cuh"
    return _of_walks(kernel, "segments", header, gradients, tile, half, normalize, decay)


def _of_walks(
    kernel: str, what: str, header: str, gradients: str, tile: tuple[int, int], *flags: bool
) -> Instance:
    half, normalize, decay = flags
    normalize = normalize and gradients != "dv" and not decay
    of = gradients.split(" and ")
    name = _of_tile(f"{what}_{'_'.join(of)}", tile, normalize or decay or gradients == "dv")
    config = f"PassConfig<{_TYPES[half]}, {tile[0]}, {tile[1]}, Gradient::%s, {_cpp(normalize)}>"
    return _instance(CHUNKWISE[decay], name, header, [f"{kernel}<{config % x}>" for x in of], half)


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


# Of the delta rule, GLA and KDA; a tile is of K unless it says otherwise, walkers of a CTA are 1 or 2


def delta_matrices(tile: int, half: bool, scores: bool) -> Instance:
    """The delta rule's chunk matrices; with scores P is made, too."""
    kernel = f"delta_matrices_kernel<{_TYPES[half]}, {tile}, {_cpp(scores)}>"
    name = f"matrices_k{tile}{'_scores' if scores else ''}"
    return _instance(DELTA_RULE, name, "chunk_matrices/kernel.cuh", [kernel], half)


def delta_forward(tile: int, half: bool, walkers: int, matrices: str = "given") -> Instance:
    """The walk of the delta rule's forward. matrices: "given", "by makers" beside the walk, or "in the
    walk", which takes two walkers and a tile of 128."""
    suffix, function, more = {
        "given": ("", "", ""),
        "by makers": ("_makers", "_with_makers", ", kWarpgroupsOfMakers"),
        "in the walk": ("_in_walk", "", ", 0, true"),
    }[matrices]
    kernel = f"delta_forward{function}_kernel<ForwardConfig<{_TYPES[half]}, {tile}, {walkers}{more}>>"
    return _instance(DELTA_RULE, f"forward_k{tile}_w{walkers}{suffix}", "forward/kernel.cuh", [kernel], half)


# of the delta rule: how early the walks of a split's segments begin; what carries states over these segments,
# for the backward, too; dbeta of sums over V; dg of the sums that the one walk leaves
_DELTA_OF_ALL = {
    "leads": "split/leads.cuh",
    "carry": "split/carry.cuh",
    "strength": "backward/strength.cuh",
    "decay": "backward/gradients/decay.cuh",
}


def delta_of_all(name: str) -> Instance:
    """A kernel that serves all dtypes: "leads", "carry", "decay" or "strength"."""
    return _instance(DELTA_RULE, name, _DELTA_OF_ALL[name], [f"delta_{name}_kernel"])


def delta_maps(tile: int, half: bool) -> Instance:
    """What each segment of a split makes of the state."""
    kernel = f"delta_maps_kernel<MapsConfig<{_TYPES[half]}, {tile}>>"
    return _instance(DELTA_RULE, f"maps_k{tile}", "split/maps.cuh", [kernel], half)


def delta_inputs(tile: int, half: bool, backward: bool) -> Instance:
    """What makes the delta rule's inputs of raw ones, or the gradients of these."""
    suffix, header = ("_backward", "backward") if backward else ("", "forward")
    kernel = f"delta_inputs{suffix}_kernel<{_TYPES[half]}, {tile}>"
    return _instance(DELTA_RULE, f"inputs{suffix}_k{tile}", f"inputs/{header}.cuh", [kernel], half)


def delta_mirror(tile: int, half: bool, walkers: int) -> Instance:
    """The mirror walk of the delta rule's backward: with a tile of up to 128 it leaves states alone."""
    kernel = f"delta_mirror_kernel<MirrorConfig<{_TYPES[half]}, {tile}, {walkers}>>"
    return _instance(DELTA_RULE, f"mirror_k{tile}_w{walkers}", "backward/kernel.cuh", [kernel], half)


def delta_gradients(half: bool, sums: bool) -> Instance:
    """The walk that makes dq, dk and dv of the delta rule at once, K up to 128; with sums it leaves those for
    the gradient of the log decay, too."""
    kernel = f"delta_gradients_kernel<GradientsConfig<{_TYPES[half]}, {_cpp(sums)}>>"
    name = f"gradients{'_and_sums' if sums else ''}"
    return _instance(DELTA_RULE, name, "backward/gradients/kernel.cuh", [kernel], half)


def delta_combine(half: bool) -> Instance:
    """What adds up parts of dq and dk."""
    kernel = f"delta_combine_kernel<{_TYPES[half]}>"
    return _instance(DELTA_RULE, "combine", "backward/combine.cuh", [kernel], half)


def delta_states(walk: str, half: bool) -> Instance:
    """A walk of the delta rule's backward over the states, K of more than 128: "left", "right", or "paired
    left", of two CTAs that share results."""
    direction, paired = walk.split()[-1], walk.startswith("paired")
    kernel = f"delta_states_kernel<StatesConfig<{_TYPES[half]}, StateWalk::{direction}, {_cpp(paired)}>>"
    return _instance(DELTA_RULE, walk.replace(" ", "_"), "backward/states/kernel.cuh", [kernel], half)


def gla_walk(direction: str, tile: int, half: bool, walkers: int, makers: int) -> Instance:
    """The walk of GLA's "forward", or of its "backward", the mirror. makers: CTAs of a cluster that take
    turns at making the operands: 1, or 2 with two walkers."""
    config = "ForwardConfig" if direction == "forward" else "MirrorConfig"
    kernel = f"gla_walk_kernel<{config}<{_TYPES[half]}, {tile}, {walkers}, {makers}>>"
    name = f"{direction}_k{tile}_w{walkers}{'_pairs' if makers == 2 else ''}"
    return _instance(GLA, name, "forward/kernel.cuh", [kernel], half)


def gla_states(walk: str, tile: int, half: bool, walkers: int) -> Instance:
    """The "left" or "right" walk of GLA's backward over the states. tile: of V, one of GLA_STATES_TILES;
    with 256 there are two walkers always."""
    walkers = 2 if tile == 256 else walkers
    kernel = f"gla_states_kernel<StatesConfig<{_TYPES[half]}, {tile}, {walkers}, StateWalk::{walk}>>"
    return _instance(GLA, f"{walk}_v{tile}_w{walkers}", "backward/states/kernel.cuh", [kernel], half)


def gla_segments(dim_v: int, half: bool, backward: bool) -> Instance:
    """The states at the borders between GLA's segments, or their gradients."""
    tile = 64 if dim_v <= 64 else 128
    of_sums = f"gla_sums_kernel<SumsConfig<{_TYPES[half]}, {tile}, {_cpp(backward)}>>"
    kernels = of_sums, f"gla_carry_kernel<{_cpp(backward)}>"
    return _instance(
        GLA, f"segments_v{tile}{'_backward' if backward else ''}", "segments/kernels.cuh", kernels, half
    )


# of KDA: what makes its chunk matrices and all that its walk reads of q, k, g and beta; the walk of its
# forward; the mirror of that, in its backward; what makes the gradients, of all chunks in parallel
_KDA = {"matrices": "matrices", "forward": "forward", "mirror": "backward", "gradients": "gradients"}


def kda(name: str, tile: int, half: bool, walkers: int | None = None) -> Instance:
    """A kernel of KDA by its name; "forward" and "mirror" have walkers."""
    of = f"{_TYPES[half]}, {tile}"
    if walkers is not None:
        of = f"{name.capitalize()}Config<{of}, {walkers}>"
    suffix = "" if walkers is None else f"_w{walkers}"
    return _instance(
        KDA, f"{name}_k{tile}{suffix}", f"{_KDA[name]}/kernel.cuh", [f"kda_{name}_kernel<{of}>"], half
    )


def all_instances() -> list[Instance]:
    """The shipped ones, and the forward of mLSTM without overlap."""
    sequential = itertools.product(SEQUENTIAL_TILES, (False, True))
    return [*shipped_instances(), *(mlstm_fwd(*of, sequential=True) for of in sequential)]


@functools.cache
def shipped_instances() -> tuple[Instance, ...]:
    """Every instance that a call takes."""
    halves = False, True
    found: list[Instance] = []
    for half, decay in itertools.product(halves, halves):
        found += _scalar_gate_instances(half, decay)
    for of_half in (_delta_instances, _gla_instances, _kda_instances):
        found += itertools.chain(*map(of_half, halves))
    found += map(mlstm_fwd_combine, halves)
    found += map(mlstm_bwd_combine, halves)
    found += [mlstm_bwd_gates(), mlstm_bwd_gates(sigmoid_gate=True), mlstm_bwd_gates(decay=True)]
    found += map(delta_of_all, _DELTA_OF_ALL)
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


def _scalar_gate_instances(half: bool, decay: bool) -> Iterator[Instance]:
    for normalize in (False,) if decay else (True, False):
        for tile in MLSTM_TILES:
            for sigmoid_gate in (False,) if tile[0] < 256 or decay else (False, True):
                if normalize or sigmoid_gate or decay or tile[0] < 256:
                    yield mlstm_fwd(tile, half, normalize, sigmoid_gate, decay)
            yield mlstm_fwd_states(tile, half, normalize, decay)
        for tile in WALK_TILES:
            if tile[1] < 256:
                if makes_gradients("dq and dk", tile):
                    yield mlstm_walk("dq and dk", tile, half, normalize, decay)
                yield mlstm_walk_segments(tile, half, normalize, decay)
    yield from (mlstm_walk("dv", x, half, decay=decay) for x in WALK_TILES if makes_gradients("dv", x))
    for of_both in GRADIENTS_TILES:
        if decay:
            yield from (mlstm_gradients(of_both, half, sums=sums, decay=True) for sums in (False, True))
        else:
            yield from (mlstm_gradients(of_both, half, normalize) for normalize in (True, False))
    if not decay:
        yield mlstm_bwd_rows(half)


def _delta_instances(half: bool) -> Iterator[Instance]:
    for tile in DELTA_TILES:
        # as matrices_before in backends/tk/delta_rule/split.py: who makes P
        makes_scores = {64: (False,), 256: (True,)}.get(tile, (False, True))
        yield from (delta_matrices(tile, half, scores) for scores in makes_scores)
        yield from (delta_forward(tile, half, walkers) for walkers in (1, 2))
        yield from (delta_mirror(tile, half, walkers) for walkers in ((2,) if tile <= 128 else (1, 2)))
        yield from (delta_inputs(tile, half, backward) for backward in (False, True))
        if tile <= 128:
            yield from (delta_forward(tile, half, walkers, "by makers") for walkers in (1, 2))
            yield delta_maps(tile, half)
    yield delta_forward(128, half, 2, "in the walk")
    yield from (delta_gradients(half, sums) for sums in (False, True))
    yield delta_combine(half)
    yield from (delta_states(walk, half) for walk in ("left", "paired left", "right"))


def _gla_instances(half: bool) -> Iterator[Instance]:
    for direction, tile in itertools.product(("forward", "backward"), GLA_TILES):
        yield from (gla_walk(direction, tile, half, *of) for of in ((1, 1), (2, 1), (2, 2)))
    for walk, tile in itertools.product(("left", "right"), GLA_STATES_TILES):
        yield from (gla_states(walk, tile, half, walkers) for walkers in ((2,) if tile == 256 else (1, 2)))
    yield from (gla_segments(dim_v, half, backward) for dim_v in (64, 128) for backward in (False, True))


def _kda_instances(half: bool) -> Iterator[Instance]:
    for tile in KDA_TILES:
        yield from (kda(name, tile, half) for name in ("matrices", "gradients"))
        for walkers in (1, 2):
            yield from (kda(name, tile, half, walkers) for name in ("forward", "mirror"))
