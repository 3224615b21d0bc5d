"""The kernel instances that are shipped: one source file, one set of macro definitions, one module."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

# (K tile, V slice of one CTA); smaller head dims are padded to the tile, larger V takes several CTAs
MLSTM_TILES = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 64), (256, 128))
# (tile of the keys, slice of the values of one CTA) of the backward's walks; slices of 256 are dv's
WALK_TILES = MLSTM_TILES
MAX_DIM_QK, MAX_DIM_V = 256, 512
DELTA_TILES = (64, 128, 256)  # K of the delta rule
DELTA_STATES_TILES = (64, 128)  # V of its walks for dq and dk
DELTA_DIRECTIONS = ("forward", "backward")
GLA_TILES = (64, 128)  # K of gated linear attention, of one launch
GLA_STATES_TILES = (64, 128, 256)  # V of its backward's walks for dq, dk and dg
GLA_DIRECTIONS = ("forward", "backward")
_LAYOUT = ("CHUNK", "ANCHOR_CHUNKS", "DTYPES")
# tokens of one call of mlstm_sequence
SEQUENCE_TILES = (8, 16)
MAX_TOKENS = max(SEQUENCE_TILES)


@dataclass(frozen=True)
class Instance:
    """One kernel to compile.

    Attributes:
        name: The module's name, for instance ``mlstm_fwd_k128_v256``.
        source: The kernel's file below ``kernels/``, for instance ``scalar_gate/forward/forward.cu``.
        defines: Macros and their values.
        bindings: The file of the module's pybind11 bindings below ``kernels/``.
        exports: What the module exports that ``exports.EXPECTED`` has, too.
    """

    name: str
    source: str
    defines: tuple[tuple[str, str], ...]
    bindings: str = "scalar_gate/bindings/forward.cpp"
    exports: tuple[str, ...] = ()


@functools.cache
def for_scalar_decay(instance: Instance) -> Instance:
    """The same kernels with a scalar decay in the place of mLSTM's gates, and without a normaliser."""
    name = instance.name.replace("mlstm", "decay", 1)
    return replace(instance, name=name, defines=(*instance.defines, ("TFLA_SCALAR_DECAY", "1")))


@functools.cache
def mlstm_fwd(dim_qk: int, dim_v: int, sequential: bool = False) -> Instance:
    """The mLSTM forward for head dims up to MAX_DIM_QK and MAX_DIM_V, by the smallest tile that holds them.

    Args:
        sequential: one that waits for every GEMM before its next step, to measure what the overlap gains.

    Raises:
        ValueError: No tile is large enough.
    """
    if not (0 < dim_qk <= MAX_DIM_QK and 0 < dim_v <= MAX_DIM_V):
        raise ValueError(f"head dims: expected at most {MAX_DIM_QK}/{MAX_DIM_V}, got {dim_qk}/{dim_v}")
    tile_qk = min(qk for qk, _ in MLSTM_TILES if qk >= dim_qk)
    slices = [v for qk, v in MLSTM_TILES if qk == tile_qk]
    slice_v = min((v for v in slices if v >= dim_v), default=max(slices))
    name = f"mlstm_fwd_k{tile_qk}_v{slice_v}"
    defines: tuple[tuple[str, str], ...] = ("TFLA_DIM_QK", str(tile_qk)), ("TFLA_SLICE_V", str(slice_v))
    if sequential:
        name, defines = f"{name}_sequential", (*defines, ("TFLA_SEQUENTIAL", "1"))
    return Instance(name, "scalar_gate/forward/forward.cu", defines, exports=_LAYOUT)


@functools.cache
def mlstm_bwd() -> Instance:
    """The small kernels around the walks of the mLSTM backward, for all head dims."""
    return Instance(
        "mlstm_bwd",
        "scalar_gate/backward/around_walks.cu",
        (),
        "scalar_gate/bindings/backward.cpp",
        exports=(*_LAYOUT, "ADDRESS_BITS"),
    )


@functools.cache
def mlstm_step() -> Instance:
    """One token of mLSTM, for all head dims and dtypes."""
    return Instance(
        "mlstm_step",
        "scalar_gate/decode/step.cu",
        (),
        "scalar_gate/bindings/step.cpp",
        exports=(*_LAYOUT, "MAX_KEYS", "MAX_SLICES"),
    )


@functools.cache
def mlstm_sequence(tokens: int) -> Instance:
    """A few tokens of mLSTM, for all head dims and dtypes, by the smallest tile that holds them.

    Raises:
        ValueError: More than MAX_TOKENS of them, or none.
    """
    if not 0 < tokens <= MAX_TOKENS:
        raise ValueError(f"tokens: expected 1 to {MAX_TOKENS}, got {tokens}")
    tile = min(tile for tile in SEQUENCE_TILES if tile >= tokens)
    return Instance(
        f"mlstm_sequence_t{tile}",
        "scalar_gate/decode/sequence.cu",
        (("TFLA_TOKENS", str(tile)),),
        "scalar_gate/bindings/sequence.cpp",
        exports=(*_LAYOUT, "MAX_KEYS", "MAX_SLICES"),
    )


@functools.cache
def mlstm_pass(gradient: str, dim_keys: int, dim_values: int) -> Instance:
    """A walk of the mLSTM backward, by the smallest tile that holds its operands, else the largest slice.

    Args:
        gradient: "dq", "dk" or "dv", what the walk makes.
        dim_keys: Columns of what the walk takes for queries and keys, up to MAX_DIM_QK.
        dim_values: Columns of what it takes for values, any number.

    Raises:
        ValueError: No tile is large enough.
    """
    if not (0 < dim_keys <= MAX_DIM_QK and dim_values > 0):
        raise ValueError(f"columns: expected keys of at most {MAX_DIM_QK}, got {dim_keys}/{dim_values}")
    tile = min(keys for keys, _ in WALK_TILES if keys >= dim_keys)
    slices = [v for keys, v in WALK_TILES if keys == tile and (gradient == "dv" or v < 256)]
    return _walk_instance(tile, min((v for v in slices if v >= dim_values), default=max(slices)))


def _walk_instance(tile_keys: int, slice_values: int) -> Instance:
    return Instance(
        f"mlstm_pass_k{tile_keys}_v{slice_values}",
        "scalar_gate/backward/walk/walk.cu",
        (("TFLA_DIM_KEYS", str(tile_keys)), ("TFLA_SLICE", str(slice_values))),
        "scalar_gate/bindings/walk.cpp",
        exports=(*_LAYOUT, "GRADIENTS", "ADDRESS_BITS"),
    )


@functools.cache
def delta_rule(direction: str, dim_k: int) -> Instance:
    """The forward or the backward of the delta rule, for any V, by the smallest tile of K.

    Args:
        direction: "forward" or "backward".

    Raises:
        ValueError: No tile is large enough.
    """
    if not 0 < dim_k <= max(DELTA_TILES):
        raise ValueError(f"K: expected at most {max(DELTA_TILES)}, got {dim_k}")
    tile = min(tile for tile in DELTA_TILES if tile >= dim_k)
    return Instance(
        f"delta_{direction}_k{tile}",
        f"delta_rule/{direction}/{direction}.cu",
        (("TFLA_DIM_K", str(tile)),),
        f"delta_rule/bindings/{direction}.cpp",
        exports=("CHUNK", "SEGMENT_CHUNKS", "DTYPES", "ADDRESS_BITS"),
    )


@functools.cache
def delta_states(dim_v: int) -> Instance:
    """The walks of the delta rule's backward for dq and dk, for any K, by the smallest tile that holds V, or
    by the largest one, which takes a larger V in slices.

    Raises:
        ValueError: V is too large.
    """
    if not 0 < dim_v <= MAX_DIM_V:
        raise ValueError(f"V: expected at most {MAX_DIM_V}, got {dim_v}")
    tile = min((tile for tile in DELTA_STATES_TILES if tile >= dim_v), default=max(DELTA_STATES_TILES))
    return Instance(
        f"delta_states_v{tile}",
        "delta_rule/backward/states/states.cu",
        (("TFLA_DIM_V", str(tile)),),
        "delta_rule/bindings/states.cpp",
        exports=("CHUNK", "DELTA_ANCHOR_CHUNKS", "SEGMENT_CHUNKS", "DTYPES", "ADDRESS_BITS"),
    )


@functools.cache
def gla(direction: str, dim_k: int) -> Instance:
    """The forward or the mirror walk of the backward of gated linear attention, for any V, by the smallest
    tile of K.

    Args:
        direction: "forward" or "backward".

    Raises:
        ValueError: No tile is large enough.
    """
    if not 0 < dim_k <= max(GLA_TILES):
        raise ValueError(f"K: expected at most {max(GLA_TILES)}, got {dim_k}")
    tile = min(tile for tile in GLA_TILES if tile >= dim_k)
    return Instance(
        f"gla_{direction}_k{tile}",
        f"channel_gate/{direction}/{direction}.cu",
        (("TFLA_DIM_K", str(tile)),),
        f"channel_gate/bindings/{direction}.cpp",
        exports=("CHUNK", "DTYPES", "ADDRESS_BITS"),
    )


@functools.cache
def gla_states(dim_v: int) -> Instance:
    """The walks of GLA's backward for dq, dk and dg, for any K, by the smallest tile of V.

    Raises:
        ValueError: No tile is large enough.
    """
    if not 0 < dim_v <= max(GLA_STATES_TILES):
        raise ValueError(f"V: expected at most {max(GLA_STATES_TILES)}, got {dim_v}")
    tile = min(tile for tile in GLA_STATES_TILES if tile >= dim_v)
    return Instance(
        f"gla_states_v{tile}",
        "channel_gate/backward/states/states.cu",
        (("TFLA_DIM_V", str(tile)),),
        "channel_gate/bindings/states.cpp",
        exports=("CHUNK", "ANCHOR_CHUNKS", "DTYPES", "ADDRESS_BITS"),
    )


@functools.cache
def gla_segments() -> Instance:
    """The kernels that cut GLA's sequences, for all head dims."""
    return Instance(
        "gla_segments",
        "channel_gate/segments/segments.cu",
        (),
        "channel_gate/bindings/segments.cpp",
        exports=("CHUNK", "DTYPES", "ADDRESS_BITS"),
    )


def all_instances() -> list[Instance]:
    """The shipped ones, then those that measurements alone take."""
    return [*shipped_instances(), mlstm_fwd(128, 256, sequential=True), mlstm_fwd(256, 512, sequential=True)]


def shipped_instances() -> list[Instance]:
    """Every instance that some call takes."""
    chunkwise = [
        *(mlstm_fwd(qk, v) for qk, v in MLSTM_TILES),
        *(_walk_instance(keys, v) for keys, v in WALK_TILES),
        mlstm_bwd(),
    ]
    return [
        *chunkwise,
        *map(for_scalar_decay, chunkwise),
        *(delta_rule(direction, k) for direction in DELTA_DIRECTIONS for k in DELTA_TILES),
        *map(delta_states, DELTA_STATES_TILES),
        *(gla(direction, k) for direction in GLA_DIRECTIONS for k in GLA_TILES),
        *map(gla_states, GLA_STATES_TILES),
        gla_segments(),
        mlstm_step(),
        *(mlstm_sequence(tokens) for tokens in SEQUENCE_TILES),
    ]
