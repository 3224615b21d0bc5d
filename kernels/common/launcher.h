// What a launcher, the host half of some kernels, offers to Python: functions that prepare or make launches
// or tell sizes, and constants. Python passes each function's arguments as one row of numbers, which the
// function reads in order. A prepared launch lacks nothing but where the tensors of a call begin.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/operand.h"

namespace tfla_tk {

// One argument of Python's: an int or a bool, a float, or None.
struct Argument {
    enum class Kind { integer, real, none } kind;
    std::int64_t integer;
    double real;
};

// Reads the arguments of a call in order.
class Arguments {
  public:
    Arguments(const char* function, const std::vector<Argument>& all) : function(function), all(all) {}

    std::int64_t integer() { return next(Argument::Kind::integer, "an integer").integer; }
    float real() {
        if (at < all.size() && all[at].kind == Argument::Kind::integer)
            return static_cast<float>(all[at++].integer);
        return static_cast<float>(next(Argument::Kind::real, "a number").real);
    }

    template <class X> X read() {
        X x{};
        (*this)(x);
        return x;
    }
    // Reads numbers, addresses (0: none) and structs with fields().
    template <class... X> void operator()(X&... x) { (read_into(x), ...); }
    // Whether the next argument is given; None is skipped.
    void given(bool& so) {
        so = at >= all.size() || all[at].kind != Argument::Kind::none;
        if (!so) at++;
    }

    void end() const {
        if (at != all.size())
            fail("takes " + std::to_string(at) + " arguments, got " + std::to_string(all.size()));
    }

  private:
    template <class X> void read_into(X& x) {
        if constexpr (std::is_pointer_v<X>)
            x = reinterpret_cast<X>(integer());
        else if constexpr (std::is_same_v<X, bool>)
            x = integer() != 0;
        else if constexpr (std::is_same_v<X, float>)
            x = real();
        else if constexpr (std::is_integral_v<X> || std::is_enum_v<X>)
            x = static_cast<X>(integer());
        else
            x.fields(*this);
    }
    const Argument& next(Argument::Kind kind, const char* expected) {
        if (at >= all.size()) fail("takes more than the " + std::to_string(at) + " arguments that it got");
        if (all[at].kind != kind) fail("argument " + std::to_string(at) + ": expected " + expected);
        return all[at++];
    }
    [[noreturn]] void fail(const std::string& what) const {
        throw std::invalid_argument(std::string(function) + ": " + what);
    }

    const char* function;
    const std::vector<Argument>& all;
    std::size_t at = 0;
};

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

struct LauncherFunction {
    const char* name;
    // One of them is not null.
    std::unique_ptr<Launch> (*prepare)(Arguments&) = nullptr;
    std::vector<std::int64_t> (*tell)(Arguments&) = nullptr;
    void (*run)(Arguments&) = nullptr;
};

struct Launcher {
    std::vector<LauncherFunction> functions;
    // A name "DTYPES.bfloat16" is an entry of a dictionary.
    std::vector<std::pair<const char*, std::int64_t>> constants;
};

// The function that prepares kLaunch, whose parameters have fields().
template <auto kLaunch> LauncherFunction prepares(const char* name) {
    auto with_parameters = [&]<class Params>(void (*)(const Params&, void*)) {
        return LauncherFunction{name, [](Arguments& x) { return prepared<kLaunch>(x.read<Params>()); }};
    };
    return with_parameters(kLaunch);
}

// The function that launches at once: of its parameters, behind which the stream is passed.
template <auto kRun> LauncherFunction runs(const char* name) {
    auto with_parameters = [&]<class Params>(void (*)(const Params&, void*)) {
        return LauncherFunction{.name = name, .run = [](Arguments& x) {
                                    const auto params = x.read<Params>();
                                    void* const stream = x.read<void*>();
                                    x.end();
                                    kRun(params, stream);
                                }};
    };
    return with_parameters(kRun);
}

// The function that tells the number, or the array of numbers, which kTell makes of its arguments.
template <auto kTell> LauncherFunction tells(const char* name) {
    using Told = std::vector<std::int64_t>;
    auto with_parameters = [&]<class Found, class... X>(Found (*)(X...)) {
        return LauncherFunction{.name = name, .tell = [](Arguments& reader) {
                                    std::tuple<std::remove_cvref_t<X>...> all;
                                    std::apply(reader, all);
                                    const auto found = std::apply(kTell, all);
                                    if constexpr (std::is_integral_v<Found>)
                                        return Told{found};
                                    else
                                        return Told{found.begin(), found.end()};
                                }};
    };
    return with_parameters(kTell);
}

// Adds those of a cubin to the kernels that a launcher launches. Throws std::runtime_error.
void load_kernels(const char* cubin);

}  // namespace tfla_tk

// What a launcher's library exports.
extern "C" {
__attribute__((visibility("default"))) const tfla_tk::Launcher* tfla_launcher();
__attribute__((visibility("default"))) void tfla_load_kernels(const char* cubin);
}
