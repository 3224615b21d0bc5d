// What a launcher, the host half of some kernels, offers to Python: functions that prepare or make launches
// or tell sizes, and constants. Python passes each function's arguments as one row of numbers, which the
// function reads in order. No Python, CUDA or Torch header here, so that the bindings compile in a second.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/operand.h"
#include "common/prepared_launches.h"

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
    int number() { return static_cast<int>(integer()); }
    bool flag() { return integer() != 0; }
    float real() {
        if (at < all.size() && all[at].kind == Argument::Kind::integer)
            return static_cast<float>(all[at++].integer);
        return static_cast<float>(next(Argument::Kind::real, "a number").real);
    }
    // A prepared address, of memory for T; 0 where there is none.
    template <class T = float> T* pointer() { return reinterpret_cast<T*>(integer()); }
    DType dtype() { return static_cast<DType>(integer()); }
    // Whether the next argument is given; None is skipped.
    bool given() {
        if (at < all.size() && all[at].kind == Argument::Kind::none) return ++at, false;
        return true;
    }
    // Address; strides of batch, head and row.
    Operand operand() { return {pointer<void>(), integer(), integer(), integer()}; }
    // The same, and the dtype.
    Gate gate() { return {pointer<const void>(), integer(), integer(), integer(), dtype()}; }

    void end() const {
        if (at != all.size())
            fail("takes " + std::to_string(at) + " arguments, got " + std::to_string(all.size()));
    }

  private:
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

// The function that prepares kLaunch, with the parameters that kRead reads.
template <auto kLaunch, auto kRead> LauncherFunction prepares(const char* name) {
    return {name, [](Arguments& x) { return prepared<kLaunch>(kRead(x)); }};
}

// Adds those of a cubin to the kernels that a launcher launches. Throws std::runtime_error.
void load_kernels(const char* cubin);

}  // namespace tfla_tk

// What a launcher's library exports.
extern "C" {
__attribute__((visibility("default"))) const tfla_tk::Launcher* tfla_launcher();
__attribute__((visibility("default"))) void tfla_load_kernels(const char* cubin);
}
