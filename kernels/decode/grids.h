// Calls of more batch entries or heads than a grid has CTAs: several launches, each of a part.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/operand.h"

namespace tfla_tk::decode {

constexpr int kMostOfGrid = 65535;  // CTAs along y, and along z

template <class X> void skip(X*& data, std::int64_t elements, DType dtype) {
    using Byte = std::conditional_t<std::is_const_v<X>, const char, char>;
    if (data != nullptr) data = reinterpret_cast<Byte*>(data) + elements * (dtype == DType::float32 ? 4 : 2);
}

}  // namespace tfla_tk::decode
