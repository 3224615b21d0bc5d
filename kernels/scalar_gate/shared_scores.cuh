// Scores shared by two neighbouring slices of a head. Their CTAs form a cluster, and each computes the scores
// of every second chunk of the walk for both.
#pragma once

#include "common/cluster.cuh"

namespace tfla_tk::mlstm {

// Which CTA of a cluster of one or two CTAs computes the scores of a step.
struct ScoreTurns {
    // CTAs of a cluster: one where the number of slices is odd.
    static int cluster(int slices) { return slices % 2 == 0 ? 2 : 1; }

    __device__ static inline int maker(int step) { return step & (cluster_ctas() - 1); }
    __device__ static inline bool makes(int step) { return maker(step) == cta_in_cluster(); }
};

}  // namespace tfla_tk::mlstm
