// How the log decays of the delta rule and of KDA are given.
#pragma once

namespace tfla_tk {

// What is made of g, the log decay:
//   log        g itself, at most 0
//   softplus   -e^{A_log} softplus(g + dt_bias)
//   sigmoid    lower_bound sigmoid(e^{A_log} (g + dt_bias)), of KDA alone
enum class LogDecay : int { log = 0, softplus = 1, sigmoid = 2 };

}  // namespace tfla_tk
