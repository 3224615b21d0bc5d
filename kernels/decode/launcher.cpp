// What Python calls of the launcher of the decoding kernels. Addresses are those of the tensors.
#include "decode/mlstm/params.h"
#include "decode/params.h"
#include "sequence/read_arguments.h"

namespace tfla_tk {
namespace {

// Address, strides of batch, token and head, dtype; or None.
Numbers read_numbers(Arguments& x) {
    if (!x.given()) return {};
    return {x.pointer<const void>(), x.integer(), x.integer(), x.integer(), x.dtype()};
}

// Address and dtype; or None.
PerHead read_per_head(Arguments& x) {
    if (!x.given()) return {};
    return {x.pointer<const void>(), x.dtype()};
}

// Address, or 0, and the stride of slots.
StatePool read_pool(Arguments& x) { return {x.pointer<void>(), x.integer()}; }

// Address, stride, columns, every, address of the accepted or 0, first; or None.
Slots read_slots(Arguments& x) {
    if (!x.given()) return {};
    return {x.pointer<const int>(), x.integer(), x.number(), x.flag(), x.pointer<const int>(), x.number()};
}

// q, k, v, o, g, beta, A_log, dt_bias, states before, states after, dtype of the states, slots, offsets,
// whether they are 64-bit, batch, heads, heads of v, K, V, tokens, scale, v_first, by_channel, delta_rule,
// l2norm, beta_sigmoid, beta_double, gate, lower_bound, device, stream.
void launch_tokens(Arguments& x) {
    DecodeParams p{read_numbers(x), read_numbers(x), read_numbers(x),  read_numbers(x),
                   read_numbers(x), read_numbers(x), read_per_head(x), read_per_head(x)};
    p.before = read_pool(x), p.after = read_pool(x), p.state_dtype = x.dtype(), p.slots = read_slots(x);
    p.offsets = x.pointer<const void>(), p.offsets_are_64bit = x.flag();
    p.batch = x.number(), p.heads = x.number(), p.value_heads = x.number();
    p.dim_k = x.number(), p.dim_v = x.number(), p.tokens = x.number(), p.scale = x.real();
    p.v_first = x.flag(), p.by_channel = x.flag(), p.delta_rule = x.flag(), p.l2norm = x.flag();
    p.beta_sigmoid = x.flag(), p.beta_double = x.flag();
    p.gate = static_cast<DecodeGate>(x.number()), p.lower_bound = x.real(), p.device = x.number();
    void* const stream = x.pointer<void>();
    x.end();
    run_decode(p, stream);
}

// Address; strides of batch, head, token and column.
MlstmRows read_rows(Arguments& x) {
    return {x.pointer<const void>(), x.integer(), x.integer(), x.integer(), x.integer()};
}

// c, n, m (0 with the sigmoid gate), and their dtypes.
MlstmState read_mlstm_state(Arguments& x) {
    return {x.pointer<void>(), x.pointer<void>(), x.pointer<void>(), x.dtype(), x.dtype(), x.dtype()};
}

// q, k, v, their and h's dtype, i, f, state before, state after, h, across, width, batch, heads, tokens, K,
// V, scale, eps, sigmoid_gate, normalize, in_place, device, stream.
void launch_mlstm(Arguments& x) {
    MlstmParams p{read_rows(x), read_rows(x), read_rows(x), x.dtype(), x.gate(), x.gate()};
    p.before = read_mlstm_state(x), p.after = read_mlstm_state(x), p.h = x.pointer<void>();
    p.tiling = {x.number(), x.number()};
    p.batch = x.number(), p.heads = x.number(), p.tokens = x.number();
    p.dim_k = x.number(), p.dim_v = x.number(), p.scale = x.real(), p.eps = x.real();
    p.sigmoid_gate = x.flag(), p.normalize = x.flag(), p.in_place = x.flag(), p.device = x.number();
    void* const stream = x.pointer<void>();
    x.end();
    run_mlstm(p, stream);
}

// K, v_first: columns of V that a launch takes together.
std::vector<std::int64_t> columns(Arguments& x) {
    const int dim_k = x.number();
    return {decode_columns(dim_k, x.flag())};
}

Launcher functions() {
    return {{{.name = "decode", .run = &launch_tokens},
             {.name = "decode_columns", .tell = &columns},
             {.name = "mlstm", .run = &launch_mlstm}},
            {{"DECODE_TOKENS", kDecodeTokens},
             {"MAX_KEYS", kMlstmKeys},
             {"MAX_TOKENS", kMlstmTokens},
             {"MAX_SLICES", kMlstmSlices}}};
}

}  // namespace
}  // namespace tfla_tk

const tfla_tk::Launcher* tfla_launcher() {
    using namespace tfla_tk;
    static const Launcher launcher = joined({functions()});
    return &launcher;
}
