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
        if (p.gate == KdaGate::softplus) {
            of_raw = -rate * sigmoid_of_bits(y), of_rate = -rate / kLog2e * softplus_in_bits(y);
        } else {
            const float of_y = p.lower_bound * sigmoid_of_bits(y) * sigmoid_of_bits(-y);
            of_raw = rate * of_y, of_rate = -y / kLog2e * of_y;
        }
    }

  private:
    // 1 / (1 + 2^-y)
    __device__ static inline float sigmoid_of_bits(float y) { return 1.f / (1.f + exp2f(-y)); }
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
            float of_rate = 0.f;
#pragma unroll 1
            for (int tile = 0; tile < kTiles8; tile++) store_channels(tile, of_rate);
            of_rate = warp_sum(of_rate);
            if (lane == 0) smem.rate_sums[group][warp] = of_rate;
        }
        if (group == 0 && warp < 2) store_strength(warp * 32 + lane);
        if (g.params.of_bias == nullptr && g.params.of_rate == nullptr) return;
        __syncthreads();
        store_parts();
    }

  private:
    // Elements to a row of the chunk.
    __device__ inline int64_t start_of(const Operand& x, int row) const {
        return chunk.batch * x.batch_stride + chunk.head * x.head_stride +
               static_cast<int64_t>(chunk.first_row + row) * x.row_stride;
    }
    // Of eight channels.
    __device__ inline void store_channels(int tile, float& of_rate) const {
        const Within<T, kDimK> within{g, smem, group, warp, lane};
        const Four dq(within.result(0, tile)), dk(within.result(1, tile)), sums(within.result(2, tile));
        const KdaMatricesParams& p = g.params.of;
        const int channel = group * kPart + 8 * tile + lane % 4 * 2;
        const float2 later = of_later_blocks(channel);
        float2 of_bias{0.f, 0.f};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = warp * kBlock + lane / 4 + 8 * r;
            if (row >= chunk.tokens || channel >= p.shape.dim_k) continue;
            store_row(g.params.dq, row, channel, smem.queries, smem.query_norms[row], p.scale, 0,
                      {dq.x[2 * r], dq.x[2 * r + 1]});
            store_row(g.params.dk, row, channel, smem.keys, smem.key_norms[row], 1.f, 1,
                      {dk.x[2 * r], dk.x[2 * r + 1]});
            float2 dg{sums.x[2 * r] + later.x, sums.x[2 * r + 1] + later.y};
            if (is_closed(row, channel)) dg.x = 0.f;
            if (is_closed(row, channel + 1)) dg.y = 0.f;
            if (p.gate != KdaGate::log) through_gate(dg, row, channel, of_rate);
            of_bias.x += dg.x, of_bias.y += dg.y;
            store_gates(row, channel, dg);
        }
        const float2 sum{sum_of_rows(of_bias.x), sum_of_rows(of_bias.y)};
        if (lane < 4) write_pair(smem.bias_sums[warp], channel, sum);
    }
    // Whether a gate lets through less than 2^-30: sums in fp32 do not resolve the gradient through it.
    __device__ inline bool is_closed(int row, int channel) const {
        auto b = [&](int token) { return b_at(smem.gates[group], token, channel % kPart); };
        return b(row) - (row % kBlock ? b(row - 1) : 0.f) < -30.f;
    }
    // What a token's gates get of later blocks and of the state behind the chunk, S' = e^{b_L} S + K_G^T Y.
    __device__ inline float2 of_later_blocks(int channel) const {
        float2 sum{0.f, 0.f};
        auto add = [&](const float* x, float by = 1.f) {
            sum.x += by * x[channel], sum.y += by * x[channel + 1];
        };
        for (int n = 0; n < 4 * g.groups; n++) add(smem.flow[n]);
        sum.x *= smem.factors.decay[channel], sum.y *= smem.factors.decay[channel + 1];
        for (int n = 0; n < kBlocks; n++) add(smem.block_flow[n]);
        for (int n = warp + 1; n < kBlocks; n++) add(smem.block_sums[n]);
        return sum;
    }
    // A pair of dq or dk, of the gradient d with respect to `scale` times the normed row.
    template <class Tile>
    __device__ inline void store_row(const Operand& to, int row, int channel, const Tile& tile, float norm,
                                     float scale, int kind, float2 d) const {
        float2 x{scale * norm * d.x, scale * norm * d.y};
        if (g.params.of.l2norm) {
            float dot = 0.f;
            for (int part = 0; part < Memory::kParts; part++) dot += smem.row_dots[kind][part][row];
            const char* const panel = reinterpret_cast<const char*>(&tile.data[channel / kPanelColumns]);
            const float2 raw = to_float2(*reinterpret_cast<const T2*>(
                panel + panel_offset(row, channel % kPanelColumns / 8) + channel % 8 * sizeof(T)));
            const float by = norm * norm * dot;
            x = {x.x - by * raw.x, x.y - by * raw.y};
        }
        *reinterpret_cast<T2*>(static_cast<T*>(to.data) + start_of(to, row) + channel) = from_float2<T2>(x);
    }
    __device__ inline void through_gate(float2& dg, int row, int channel, float& of_rate) const {
        const KdaMatricesParams& p = g.params.of;
        const Gate raw{p.g.data, p.g.batch_stride, p.g.head_stride, p.g.row_stride, p.g_type};
        const int64_t at = start_of(p.g, row) + channel;
        const float slope = GateScale(p, smem.rate).slope;
        const GateSlope first(p, slope * load_gate(raw, at) + smem.bias[channel], smem.rate);
        const GateSlope second(p, slope * load_gate(raw, at + 1) + smem.bias[channel + 1], smem.rate);
        of_rate += dg.x * first.of_rate + dg.y * second.of_rate;
        dg = {dg.x * first.of_raw, dg.y * second.of_raw};
    }
    __device__ inline void store_gates(int row, int channel, float2 dg) const {
        const Operand& to = g.params.dg;
        const int64_t at = start_of(to, row) + channel;
        if (g.params.of.g_type == DType::float32)
            *reinterpret_cast<float2*>(static_cast<float*>(to.data) + at) = dg;
        else if (g.params.of.g_type == DType::bfloat16)
            *reinterpret_cast<bf16_2*>(static_cast<bf16*>(to.data) + at) = from_float2<bf16_2>(dg);
        else
            *reinterpret_cast<half_2*>(static_cast<kittens::half*>(to.data) + at) = from_float2<half_2>(dg);
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
