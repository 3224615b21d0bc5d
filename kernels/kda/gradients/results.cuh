// Steps 3 and 7: what leaves a chunk. Gradients of raw inputs: through the norms of q and k, the gate and
// beta.
#pragma once

#include "kda/gradients/within.cuh"

namespace tfla_tk::kda {

// The log decay that is made of a raw gate: its gradients with respect to that and to A_log.
struct GateSlope {
    float of_raw, of_rate;

    // y: as GateScale has it. rate: e^{A_log}.
    __device__ inline GateSlope(const KdaMatricesParams& p, float y, float rate) {
        const float e = exp2f(-fabsf(y)), major = __fdividef(1.f, 1.f + e), minor = e * major;
        const float sigmoid = y < 0.f ? minor : major;  // of y, in bits
        if (p.gate == LogDecay::softplus) {
            of_raw = -rate * sigmoid, of_rate = -rate / kLog2e * softplus_in_bits(y);
        } else {
            const float of_y = p.lower_bound * major * minor;
            of_raw = rate * of_y, of_rate = -y / kLog2e * of_y;
        }
    }
};

__device__ inline void load_eight(float (&x)[8], const float* from) {
    each<0, 2>([&](int n) {
        const float4 four = reinterpret_cast<const float4*>(from)[n];
        x[4 * n] = four.x, x[4 * n + 1] = four.y, x[4 * n + 2] = four.z, x[4 * n + 3] = four.w;
    });
}

// Eight neighbours of a row of gates, as they are or as numbers.
struct EightGates {
    uint4 bits[2];

    __device__ inline void load(const Operand& from, DType dtype, int64_t at) {
        const auto* const data = static_cast<const char*>(from.data);
        if (dtype == DType::float32)
            bits[0] = reinterpret_cast<const uint4*>(data + 4 * at)[0],
            bits[1] = reinterpret_cast<const uint4*>(data + 4 * at)[1];
        else
            bits[0] = *reinterpret_cast<const uint4*>(data + 2 * at);
    }
    __device__ inline void to_numbers(float (&x)[8], DType dtype) const {
        if (dtype == DType::float32)
#pragma unroll
            for (int n = 0; n < 8; n++) x[n] = reinterpret_cast<const float*>(bits)[n];
        else if (dtype == DType::bfloat16)
            to_pairs<bf16_2>(x);
        else
            to_pairs<half_2>(x);
    }
    __device__ static inline void store(const Operand& to, DType dtype, int64_t at, const float (&x)[8]) {
        auto* const data = static_cast<char*>(to.data);
        if (dtype == DType::float32)
            reinterpret_cast<float4*>(data + 4 * at)[0] = {x[0], x[1], x[2], x[3]},
                                                 reinterpret_cast<float4*>(data + 4 * at)[1] = {x[4], x[5],
                                                                                                x[6], x[7]};
        else if (dtype == DType::bfloat16)
            store_pairs<bf16_2>(data + 2 * at, x);
        else
            store_pairs<half_2>(data + 2 * at, x);
    }

  private:
    template <class T2> __device__ inline void to_pairs(float (&x)[8]) const {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float2 pair = to_float2(reinterpret_cast<const T2*>(bits)[n]);
            x[2 * n] = pair.x, x[2 * n + 1] = pair.y;
        }
    }
    template <class T2> __device__ static inline void store_pairs(char* to, const float (&x)[8]) {
        uint4 bits;
#pragma unroll
        for (int n = 0; n < 4; n++)
            reinterpret_cast<T2*>(&bits)[n] = from_float2<T2>({x[2 * n], x[2 * n + 1]});
        *reinterpret_cast<uint4*>(to) = bits;
    }
};

// A row of dq or dk is of_gradient d - of_row x, with d the gradient with respect to `scale` times the normed
// row x.
struct RowOfGradients {
    float of_gradient, of_row;
};

template <class T, int kDimK> struct Results {
    using T2 = typename base_types::packing<T>::packed_type;
    using Memory = GradientsMemory<T, kDimK>;

    const GradientsGlobals& g;
    Memory& smem;
    const Chunk& chunk;
    const int head;         // of all batch entries
    const int group, warp;  // the part of the channels, the block of tokens
    const int lane = fresh_laneid();

    __device__ inline Results(const GradientsGlobals& g, Memory& smem, const Chunk& chunk, int head,
                              int group, int warp)
        : g(g), smem(smem), chunk(chunk), head(head), group(group), warp(warp) {}

    // G, by all threads: 16 bytes of a row at a time.
    __device__ inline void store_dv() const {
        const Operand& to = g.params.solved;
#pragma unroll 1
        for (int n = threadIdx.x; n < kChunk * kGroups * 8; n += kGradientsThreads) {
            const int row = n / (kGroups * 8), unit = n % (kGroups * 8), column = unit * 8;
            if (row >= chunk.tokens || column >= g.params.of.shape.dim_v) continue;
            const char* const panel = reinterpret_cast<const char*>(&smem.walk.solved[unit / 8]);
            *reinterpret_cast<uint4*>(static_cast<T*>(to.data) + start_of(to, row) + column) =
                *reinterpret_cast<const uint4*>(panel + panel_offset(row, unit % 8));
        }
    }

    // All others.
    __device__ inline void store(bool has_channels) const {
        if (has_channels) {
            EightGates raw;
            load_raw(raw, 0);
            sum_up_later();
            RowOfGradients rows[2][2];  // of q and k
            each<0, 2>([&](int r) {
                const int row = warp * kBlock + lane / 4 + 8 * r;
                rows[0][r] = row_of(0, row, smem.factors.query_rstd[row], g.params.of.scale);
                rows[1][r] = row_of(1, row, smem.factors.key_rstd[row], 1.f);
            });
#pragma unroll 1
            for (int tile = 0; tile < kTiles8; tile++) finish_channels(tile, rows);
            __syncwarp();
            store_rows(raw);
        }
        if (group == 0 && warp < 2) store_strength(warp * 32 + lane);
        if (g.params.of_bias == nullptr && g.params.of_rate == nullptr) return;
        __syncthreads();
        store_parts();
    }

  private:
    // A warp stores four rows at a time; a lane has eight neighbouring channels of one.
    static constexpr int kRows = 4, kRowSteps = kBlock / kRows;

    // Elements to a row of the chunk.
    __device__ inline int64_t start_of(const Operand& x, int row) const {
        return chunk.batch * x.batch_stride + chunk.head * x.head_stride +
               static_cast<int64_t>(chunk.first_row + row) * x.row_stride;
    }
    // Of the lane, where rows are stored.
    __device__ inline int stored_row(int step) const { return warp * kBlock + step * kRows + lane / 8; }
    __device__ inline int stored_channel() const { return group * kPart + lane % 8 * 8; }
    __device__ inline bool is_stored(int step) const {
        return stored_row(step) < chunk.tokens && stored_channel() < g.params.of.shape.dim_k;
    }
    __device__ inline void load_raw(EightGates& raw, int step) const {
        const KdaMatricesParams& p = g.params.of;
        if (p.gate != LogDecay::log && step < kRowSteps && is_stored(step))
            raw.load(p.g, p.g_type, start_of(p.g, stored_row(step)) + stored_channel());
    }

    // Of eight channels and the block: dq, dk and dg, in the places of q, k and b.
    __device__ inline void finish_channels(int tile, const RowOfGradients (&rows)[2][2]) const {
        auto result = [&](int kind) { return Four(smem.result(group, warp, kind, tile, lane)); };
        const Four dq = result(0), dk = result(1), sums = result(2);
        const int channel = 8 * tile + lane % 4 * 2;
        const float2 later = *reinterpret_cast<const float2*>(&smem.later[warp][group * kPart + channel]);
        bool closed[2][2];
        each<0, 2>([&](int r) {
            const int row = warp * kBlock + lane / 4 + 8 * r;
            finish_pair(smem.queries, row, tile, rows[0][r], {dq.x[2 * r], dq.x[2 * r + 1]});
            finish_pair(smem.keys, row, tile, rows[1][r], {dk.x[2 * r], dk.x[2 * r + 1]});
            closed[r][0] = is_closed(row, channel), closed[r][1] = is_closed(row, channel + 1);
        });
        __syncwarp();  // all have read b
        each<0, 2>([&](int r) {
            const int row = warp * kBlock + lane / 4 + 8 * r;
            write_pair(&b_at(smem.gates[group], row, channel), 0,
                       {closed[r][0] ? 0.f : sums.x[2 * r] + later.x,
                        closed[r][1] ? 0.f : sums.x[2 * r + 1] + later.y});
        });
    }
    // Whether a gate lets through less than 2^-16: sums of products in tf32 do not resolve the gradient
    // through it.
    __device__ inline bool is_closed(int row, int channel) const {
        auto b = [&](int token) { return b_at(smem.gates[group], token, channel); };
        return b(row) - (row % kBlock ? b(row - 1) : 0.f) < -16.f;
    }
    // What a token's gates get of later blocks and of the state behind the chunk, S' = e^{b_L} S + K_G^T Y.
    // A lane has two channels.
    __device__ inline void sum_up_later() const {
        const int channel = group * kPart + 2 * lane;
        float2 sum{0.f, 0.f};
        auto add = [&](const float* x, float by = 1.f) {
            sum.x += by * x[channel], sum.y += by * x[channel + 1];
        };
        for (int n = 0; n < 4 * g.groups; n++) add(smem.flow[n]);
        sum.x *= smem.factors.decay[channel], sum.y *= smem.factors.decay[channel + 1];
        for (int n = 0; n < kBlocks; n++) add(smem.block_flow[n]);
        for (int n = warp + 1; n < kBlocks; n++) add(smem.block_sums[n]);
        write_pair(smem.later[warp], channel, sum);
        __syncwarp();
    }
    __device__ inline RowOfGradients row_of(int kind, int row, float norm, float scale) const {
        float dot = 0.f;
        for (int part = 0; part < Memory::kParts; part++) dot += smem.row_dots[kind][part][row];
        return {scale * norm, norm * norm * dot};
    }
    template <class Tile>
    __device__ inline void finish_pair(Tile& tile, int row, int unit, RowOfGradients of, float2 d) const {
        char* const panel = reinterpret_cast<char*>(&tile.data[group]);
        T2& place = *reinterpret_cast<T2*>(panel + panel_offset(row, unit) + lane % 4 * sizeof(T2));
        float2 x{of.of_gradient * d.x, of.of_gradient * d.y};
        if (g.params.of.l2norm) {
            const float2 raw = to_float2(place);
            x = {x.x - of.of_row * raw.x, x.y - of.of_row * raw.y};
        }
        place = from_float2<T2>(x);
    }

    // dq, dk and dg; sums of d dt_bias and dA_log.
    __device__ inline void store_rows(EightGates& raw) const {
        float of_bias[8] = {}, of_rate = 0.f;
#pragma unroll 1
        for (int n = 0; n < kRowSteps && is_stored(n); n++) {
            EightGates next;
            load_raw(next, n + 1);
            const int row = stored_row(n), channel = stored_channel();
            auto store = [&](const Operand& to, const auto& tile) {
                const char* const panel = reinterpret_cast<const char*>(&tile.data[group]);
                *reinterpret_cast<uint4*>(static_cast<T*>(to.data) + start_of(to, row) + channel) =
                    *reinterpret_cast<const uint4*>(panel + panel_offset(row, lane % 8));
            };
            store(g.params.dq, smem.queries), store(g.params.dk, smem.keys);
            float dg[8];
            load_eight(dg, &b_at(smem.gates[group], row, channel % kPart));
            if (g.params.of.gate != LogDecay::log) through_gates(dg, raw, of_rate);
            each<0, 8>([&](int c) { of_bias[c] += dg[c]; });
            EightGates::store(g.params.dg, g.params.of.g_type, start_of(g.params.dg, row) + channel, dg);
            raw = next;
        }
        if (g.params.of.gate == LogDecay::log) return;
        each<0, 8>([&](int c) {
            of_bias[c] += __shfl_xor_sync(0xffffffff, of_bias[c], 8);
            of_bias[c] += __shfl_xor_sync(0xffffffff, of_bias[c], 16);
            if (lane < 8) smem.bias_sums[warp][stored_channel() + c] = of_bias[c];
        });
        of_rate = warp_sum(of_rate);
        if (lane == 0) smem.rate_sums[group][warp] = of_rate;
    }
    __device__ inline void through_gates(float (&dg)[8], const EightGates& raw, float& of_rate) const {
        const KdaMatricesParams& p = g.params.of;
        float x[8], bias[8];
        raw.to_numbers(x, p.g_type);
        load_eight(bias, &smem.bias[stored_channel()]);
        const float rate = smem.rate, slope = GateScale(p, rate).slope;
        each<0, 8>([&](int c) {
            const GateSlope of(p, slope * x[c] + bias[c], rate);
            of_rate += dg[c] * of.of_rate, dg[c] *= of.of_raw;
        });
    }
    __device__ inline void store_strength(int token) const {
        const KdaMatricesParams& p = g.params.of;
        if (token >= chunk.tokens) return;
        float sum = 0.f;
        for (int n = 0; n < 4 * g.groups; n++) sum += smem.strength[n][token];
        const float times = p.beta_double ? 2.f : 1.f, once = smem.factors.beta.of(token) / times;
        if (p.beta_sigmoid) sum *= once * (1.f - once);
        const int64_t row = static_cast<int64_t>(chunk.batch) * p.shape.seq + chunk.first_row + token;
        g.params.dbeta[row * p.shape.heads + chunk.head] = times * sum;
    }
    // Of the whole chunk, for dt_bias and A_log.
    __device__ inline void store_parts() const {
        const int64_t place = static_cast<int64_t>(head) * g.slots + chunk.slot;
        const int channel = threadIdx.x, dim_k = g.params.of.shape.dim_k;
        if (g.params.of_bias && channel < dim_k) {
            float sum = 0.f;
            for (int n = 0; n < kBlocks; n++) sum += smem.bias_sums[n][channel];
            g.params.of_bias[place * dim_k + channel] = sum;
        }
        if (g.params.of_rate && threadIdx.x == 0) {
            float sum = 0.f;
            for (int part = 0; part < Memory::kParts; part++)
                for (int n = 0; n < kBlocks; n++) sum += smem.rate_sums[part][n];
            g.params.of_rate[place] = sum;
        }
    }
};

}  // namespace tfla_tk::kda
