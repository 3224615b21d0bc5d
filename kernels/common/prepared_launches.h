// Launches that are prepared once for all calls of a kind: they lack nothing but where the tensors of a call
// begin.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "common/operand.h"

namespace tfla_tk {

// A prepared address: the number of a tensor of the call, from 1 on, times 2^kAddressBits, plus bytes from
// the tensor's start. 0: no address.
constexpr int kAddressBits = 48;

// Where the tensors of a call begin; turns prepared addresses into addresses.
class Addresses {
  public:
    explicit Addresses(const std::vector<std::int64_t>& starts) : starts(starts) {}

    template <class... X> void operator()(X&... x) const { (place(x), ...); }
    void given(bool&) const {}  // it is known already

  private:
    template <class T> void place(T*& pointer) const {
        const auto prepared = reinterpret_cast<std::int64_t>(pointer);
        if (prepared == 0) return;
        const std::int64_t start = starts.at((prepared >> kAddressBits) - 1);
        const std::int64_t offset = prepared & ((std::int64_t{1} << kAddressBits) - 1);
        pointer = reinterpret_cast<T*>(start == 0 ? 0 : start + offset);
    }
    template <class X> void place(X& x) const {
        if constexpr (std::is_class_v<X>) x.fields(*this);
    }

    const std::vector<std::int64_t>& starts;
};

class Launch {
  public:
    virtual ~Launch() = default;
    virtual void run(const Addresses& at, void* stream) const = 0;
};

// A host function with its arguments, which have fields().
template <class Params, void (*kFunction)(const Params&, void*)> class LaunchOf final : public Launch {
  public:
    explicit LaunchOf(const Params& params) : params(params) {}

    void run(const Addresses& at, void* stream) const override {
        Params placed = params;
        placed.fields(at);
        kFunction(placed, stream);
    }

  private:
    Params params;
};

template <auto kFunction, class Params> std::unique_ptr<Launch> prepared(const Params& params) {
    return std::make_unique<LaunchOf<Params, kFunction>>(params);
}

}  // namespace tfla_tk
