// Arguments of the decoding kernels. This header compiles without CUDA.
#pragma once

#include "common/operand.h"
#include "sequence/log_decay.h"

namespace tfla_tk {

// Numbers per batch entry, token and head, one or a row of them; strides in elements, unit stride along a
// row.
struct Numbers {
    const void* data;
    std::int64_t batch_stride, token_stride, head_stride;
    DType dtype;

    template <class Visit> void fields(Visit& visit) {
        bool is_given;
        visit.given(is_given);
        if (is_given) visit(data, batch_stride, token_stride, head_stride, dtype);
    }
};

// A number per head of v, or a row of them, contiguous; null where there is none.
struct PerHead {
    const void* data;
    DType dtype;

    template <class Visit> void fields(Visit& visit) {
        bool is_given;
        visit.given(is_given);
        if (is_given) visit(data, dtype);
    }
};

// The states of all heads of v: of a batch entry contiguous, [HV, V, K] or [HV, K, V]. Null: zeros before the
// tokens, not wanted behind them.
struct StatePool {
    void* data;
    std::int64_t slot_stride;  // elements from the state of a slot to that of the next

    template <class Visit> void fields(Visit& visit) { visit(data, slot_stride); }
};

// Which states of the pools are those of the batch entries. Null: their own number. Below `first` there is no
// state, and o is 0.
struct Slots {
    const int* data;      // [batch, columns]
    std::int64_t stride;  // elements from one entry's to the next one's; those of an entry are contiguous
    int columns;
    // The state behind each token is stored, where the column of the token's number tells; from the first
    // token without one on, o is 0. Otherwise the one behind the last token is, over that before the first.
    bool every;
    const int* accepted;  // [batch], before the tokens is the state of column accepted - 1; null: of column 0
    int first;

    template <class Visit> void fields(Visit& visit) {
        bool is_given;
        visit.given(is_given);
        if (is_given) visit(data, stride, columns, every, accepted, first);
    }
};

// Tokens for which a state is read and written once; more take several turns. Calls of one token have kernels
// of their own.
constexpr int kDecodeTokens = 4;

// A few tokens of a linear recurrence. Per token and head of v:
//
//     S <- decay S          decay = e^g: a number, or one per key channel
//     u = v                 or by the delta rule u = beta (v - S^T k)
//     S <- S + k u^T        o = scale S^T q
//
// NOTES: T tokens of one call are bitwise those of T calls.
struct DecodeParams {
    Numbers q, k, v, o;
    Numbers g, beta;         // data is null: nothing decays; not read without the delta rule
    PerHead a_log, dt_bias;  // of raw gates, null: 0; dt_bias per channel where the decay is
    StatePool before, after;
    DType state_dtype;
    Slots slots;
    // [batch + 1] of packed sequences, which are the entries then; null: all entries have as many tokens.
    const void* offsets;
    bool offsets_are_64bit;
    int batch, heads, value_heads, dim_k, dim_v;
    int tokens;  // of every entry; not read where they are packed
    float scale;
    bool v_first, by_channel, delta_rule;
    bool l2norm;                     // q and k are divided by their norms
    bool beta_sigmoid, beta_double;  // beta is made by a sigmoid, and doubled
    LogDecay gate;
    float lower_bound;
    int device;

    template <class Visit> void fields(Visit& visit) {
        visit(q, k, v, o, g, beta, a_log, dt_bias, before, after, state_dtype, slots, offsets,
              offsets_are_64bit, batch, heads, value_heads, dim_k, dim_v, tokens, scale, v_first, by_channel,
              delta_rule, l2norm, beta_sigmoid, beta_double, gate, lower_bound, device);
    }
};

// Columns of V that a launch takes together; V is to be a multiple.
int decode_columns(int dim_k, bool v_first);

void run_decode(const DecodeParams& params, void* stream);

}  // namespace tfla_tk
