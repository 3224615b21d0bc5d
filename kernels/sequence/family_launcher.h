// Constants that the launchers of all families tell.
#pragma once

#include "common/launcher.h"
#include "sequence/cut.h"

namespace tfla_tk {

// The launcher of a family: parts of it, and the constants that Python and the kernels of every family share.
inline Launcher joined(const std::vector<Launcher>& parts) {
    Launcher all{{},
                 {{"CHUNK", kChunk},
                  {"ADDRESS_BITS", kAddressBits},
                  {"DTYPES.float32", static_cast<int>(DType::float32)},
                  {"DTYPES.bfloat16", static_cast<int>(DType::bfloat16)},
                  {"DTYPES.float16", static_cast<int>(DType::float16)}}};
    for (const Launcher& part : parts) {
        all.functions.insert(all.functions.end(), part.functions.begin(), part.functions.end());
        all.constants.insert(all.constants.end(), part.constants.begin(), part.constants.end());
    }
    return all;
}

}  // namespace tfla_tk
