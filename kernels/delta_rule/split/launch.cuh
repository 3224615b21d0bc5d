// Host side of a split's own kernels.
#pragma once

#include "delta_rule/launch_walk.cuh"
#include "delta_rule/split/carry.cuh"
#include "delta_rule/split/maps.cuh"

namespace tfla_tk::delta_rule {

template <class T, int kDimK> void launch_maps(const DeltaMapsParams& p, cudaStream_t stream) {
    using C = MapsConfig<T, kDimK>;
    const DeltaShape& s = p.shape;
    const DeviceGuard guard(s.device, "delta_maps");
    const OperandMaps maps(s);
    const TensorMap keys = maps.of_keys(p.k), a = maps.of_matrices(p.a);
    MapsGlobals g{
        {keys,    keys,      a,       a,       GateWords(p.g), GateWords(p.beta), s.cut, p.initial,
         nullptr, p.carried, p.leads, nullptr, s.heads,        s.group,           s.seq, s.dim_k,
         s.dim_v, 0,         0.f,     nullptr, slots_of(s)},
        maps.of_values(p.v, kChunk),
        p.maps,
        p.transposed,
    };
    constexpr int kColumns = C::kWalkers * kWalkerColumns;
    const int columns = g.value_columns() + (s.dim_k + kWalkerColumns - 1) / kWalkerColumns * kWalkerColumns;
    g.ctas = (columns + kColumns - 1) / kColumns;
    launch<delta_maps_kernel<C>, sizeof(MapsMemory<C>)>(g, walk_grid(g, "delta_maps"), C::kThreads, s.device,
                                                        stream, "delta_maps");
}

inline void launch_carry(const DeltaCarryParams& p, cudaStream_t stream) {
    const DeltaShape& s = p.shape;
    const DeviceGuard guard(s.device, "delta_carry");
    const CarryGlobals g{s.cut, p.carried, p.leads, p.maps, s.heads, s.seq, s.dim_k, s.dim_v, p.backward};
    const std::int64_t ctas =
        static_cast<std::int64_t>(carrying_ctas(s.cut)) * s.heads * (s.dim_v / kCarryColumns);
    launch<delta_carry_kernel>(g, grid_of(ctas, 1, "delta_carry"), 32 * kCarryWarps, s.device, stream,
                               "delta_carry");
}

}  // namespace tfla_tk::delta_rule
