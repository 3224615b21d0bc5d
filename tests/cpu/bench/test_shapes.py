from __future__ import annotations

import pytest

from tfla_tk.bench.shapes import MAIN, SETS, SWEEP, Shape, cost, parse_shapes
from tfla_tk.bench.timing import Ceilings

# copy and GEMM rate of an H200
H200 = Ceilings(copy=4.27e12, gemm=699e12)


def test_roofline_takes_the_larger_term() -> None:
    """128/256: 0.380 ms of traffic, 0.270 ms of arithmetic; 256/512: 0.379 and 0.467 ms."""
    for shape, ms in ((MAIN[0], 0.380), (MAIN[1], 0.467)):
        assert H200.roofline_ms(cost("mlstm_exp", shape, "fwd")) == pytest.approx(ms, abs=5e-4)


AT_128_128 = {
    ("mlstm_sig", "fwd"): (98304, 1036),
    ("mlstm_exp", "fwdbwd"): (98304 + 262144, 1036 + 10 * 256),
    ("simple_gla", "fwd"): (98304, 1028),
    ("retention", "fwd"): (98304, 1024),
    ("lightning", "fwd"): (98304, 1024),
    ("simple_gla", "fwdbwd"): (98304 + 262144, 1028 + 14 * 128 + 8),
    ("retention", "fwdbwd"): (98304 + 262144, 1024 + 14 * 128),
    ("delta_rule", "fwd"): (32768 + 6 * 16384, 1028),
    ("gated_delta_rule", "fwd"): (32768 + 6 * 16384, 1032),
    ("gated_delta_rule", "fwdbwd"): (4 * 32768 + 24 * 16384, 1032 + 14 * 128 + 16),
    ("kda", "fwd"): (32768 + 6 * 16384, 1540),
    ("kda", "fwdbwd"): (4 * 32768 + 24 * 16384, 1540 + 14 * 128 + 8 * 128 + 8),
    ("gla", "fwd"): (98304, 1536),
    ("gla", "fwdbwd"): (98304 + 229376, 1536 + 14 * 128 + 8 * 128),
}


def test_cost_at_128_128() -> None:
    shape = Shape(1, 1, 1, 128, 128)
    assert {key: tuple(cost(key[0], shape, key[1])) for key in AT_128_128} == AT_128_128
    for (op, which), (_, nbytes) in AT_128_128.items():
        numbers = cost(op, shape, which, itemsize=4).bytes - nbytes
        assert numbers % (2 * 128) == 0 < numbers  # what is of q, k and v is twice as wide, gates are not


def test_cost_of_more_value_heads_counts_queries_and_keys_once() -> None:
    """q and k, their gradients and the products that no value enters: once per head of q and k."""
    shape = Shape(1, 64, 2, 128, 64, HV=32)
    tokens, forward, both = 64, cost("simple_gla", shape, "fwd"), cost("simple_gla", shape, "fwdbwd")
    assert forward.bytes == tokens * (2 * (2 * 2 * 128 + 2 * 32 * 64) + 32 * 4)
    assert both.bytes - forward.bytes == tokens * (2 * (4 * 2 * 128 + 3 * 32 * 64) + 32 * 8)
    scores, values, state = 128 * 128 * 2, 128 * 64 * 32, 128 * 64 * 32
    assert forward.flops == tokens * (scores + values + 4 * state)
    assert both.flops - forward.flops == tokens * (3 * scores + 3 * values + 10 * state)


def test_parse_shapes() -> None:
    assert parse_shapes("main") == MAIN
    assert parse_shapes("8x8192x16x128x256") == (MAIN[0],)
    assert parse_shapes("B8xT8192xH8x256/512, 1x64x1x16x32") == (MAIN[1], Shape(1, 64, 1, 16, 32))
    # a shape that stands in two sets is taken once
    assert len(parse_shapes("main,sweep")) == len({*MAIN, *SWEEP})
    assert parse_shapes("small") == SETS["small"]


def test_parse_packed_sequences_and_value_heads() -> None:
    (packed,) = parse_shapes("1x320000x4x64x64xN32000")
    assert packed == SETS["packed"][1] and str(packed) == "B1 T320000 N32000 H4 64/64"
    (grouped,) = parse_shapes("1x16384x8x128x64xHV128")
    assert grouped == SETS["scalar"][-1] and str(grouped) == "B1 T16384 H8 HV128 128/64"
    assert grouped.group == 16 and grouped.head_tokens == 16384 * 128
    assert parse_shapes("B1xT64xH2x16/32xhv4xn3") == (Shape(1, 64, 2, 16, 32, N=3, HV=4),)
    # as many as there are key heads is no shape of its own, so that rows have one key
    assert parse_shapes("2x64x2x16x16xHV2") == (Shape(2, 64, 2, 16, 16),)
    assert "HV" not in parse_shapes("2x64x2x16x16xHV2")[0].as_dict()


def test_lengths_of_packed_sequences() -> None:
    for shape in (*SETS["packed"], Shape(1, 7, 1, 16, 16, N=7), Shape(1, 65, 1, 16, 16, N=2)):
        lengths = shape.lengths(3)
        assert len(lengths) == shape.N and sum(lengths) == shape.T and min(lengths) >= 1
        assert lengths == shape.lengths(3)
    tokens = SETS["packed"][1].lengths(0)
    assert len(set(tokens)) > 5 and min(tokens) >= 4 and max(tokens) <= 16
    assert tokens != SETS["packed"][1].lengths(1)
    assert Shape(3, 40, 1, 16, 16).lengths() == [40, 40, 40]


def test_parse_shapes_refuses() -> None:
    words = ("", "big", "main,", "8x8192x16x128", "0x64x1x16x16", "2x64x1x16x16xN2", "1x64x1x16x16xN65")
    heads = ("1x64x2x16x16xHV3", "1x64x2x16x16xHV1")
    for text in (*words, *heads, "1x64x1x16x16xN0", "1x64x2x16x16xN2xN3"):
        with pytest.raises(ValueError, match="expected"):
            parse_shapes(text)
