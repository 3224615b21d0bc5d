// How the log decays of KDA's kernels and of the decoding kernels are given. For the delta rule's chunk
// kernels delta_rule/inputs/ makes them.
#pragma once

namespace tfla_tk {

// What is made of g, the log decay:
//   log        g itself
//   softplus   -e^{A_log} softplus(g + dt_bias)
//   sigmoid    lower_bound sigmoid(e^{A_log} (g + dt_bias)), of KDA alone
enum class LogDecay : int { log = 0, softplus = 1, sigmoid = 2 };

}  // namespace tfla_tk
