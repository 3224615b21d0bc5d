// The arguments that functions of the launchers with one decay per token and head take.
#pragma once

#include "scalar_gate/bindings/params.h"
#include "sequence/read_arguments.h"

namespace tfla_tk {

// c, n, log2_decay; 0 where there is none.
inline Boundaries read_boundaries(Arguments& x) { return {x.pointer(), x.pointer(), x.pointer<double>()}; }

// states, units, n; 0 where there is none.
inline LeftStates read_left_states(Arguments& x) { return {x.pointer<void>(), x.pointer(), x.pointer()}; }

// c, n, m; 0 where there is none.
inline State read_state(Arguments& x) { return {x.pointer(), x.pointer(), x.pointer()}; }

}  // namespace tfla_tk
