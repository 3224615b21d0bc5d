// The arguments of every family that Python passes to the modules, as tuples of integers.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>

#include "common/operand.h"
#include "sequence/cut.h"

namespace tfla_tk {

using OperandTuple = std::array<std::int64_t, 4>;  // pointer, batch, head and row stride in elements
using GateTuple = std::array<std::int64_t, 5>;     // the same, and the DType

using OffsetsTuple = std::array<std::int64_t, 3>;  // pointer or 0, whether they are 64-bit, sequences
using CutTuple = std::array<std::int64_t, 5>;      // the same, and segments, chunks per segment

// Exports the constants that Python and the kernels of every family share.
inline void export_chunk_and_dtypes(pybind11::module_& m) {
    m.attr("CHUNK") = kChunk;
    pybind11::dict dtypes;
    dtypes["float32"] = static_cast<int>(DType::float32);
    dtypes["bfloat16"] = static_cast<int>(DType::bfloat16);
    dtypes["float16"] = static_cast<int>(DType::float16);
    m.attr("DTYPES") = dtypes;
}

inline float* pointer(std::int64_t address) { return reinterpret_cast<float*>(address); }

inline Operand operand(const OperandTuple& x) { return {reinterpret_cast<void*>(x[0]), x[1], x[2], x[3]}; }

inline Gate gate(const GateTuple& x) {
    return {reinterpret_cast<const void*>(x[0]), x[1], x[2], x[3], static_cast<DType>(x[4])};
}

inline Cut cut(const CutTuple& x) {
    return {reinterpret_cast<const void*>(x[0]), x[1] != 0, static_cast<int>(x[2]), static_cast<int>(x[3]),
            static_cast<int>(x[4])};
}

}  // namespace tfla_tk
