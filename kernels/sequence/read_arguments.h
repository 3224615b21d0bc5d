// Arguments that functions of every family take, and constants that every launcher tells.
#pragma once

#include "common/launcher.h"
#include "sequence/cut.h"

namespace tfla_tk {

// Address of the offsets or 0, whether they are 64-bit, sequences; segments, chunks of a segment.
inline Cut read_cut(Arguments& x) {
    return {x.pointer<const void>(), x.flag(), x.number(), x.number(), x.number()};
}

// The constants that Python and the kernels of every family share, and more.
inline std::vector<std::pair<const char*, std::int64_t>> constants_and(
    std::vector<std::pair<const char*, std::int64_t>> more) {
    more.insert(more.end(), {{"CHUNK", kChunk},
                             {"ADDRESS_BITS", kAddressBits},
                             {"DTYPES.float32", static_cast<int>(DType::float32)},
                             {"DTYPES.bfloat16", static_cast<int>(DType::bfloat16)},
                             {"DTYPES.float16", static_cast<int>(DType::float16)}});
    return more;
}

}  // namespace tfla_tk
