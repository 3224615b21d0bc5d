// A product on the tensor cores.
#pragma once

namespace tfla_tk::decode {

// d += a b, of 16 x 8 numbers by 8 x 8 in tf32. Of lane 4 g + t (g < 8, t < 4) are the elements
//   a  [16 x 8]: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)
//   b  [8 x 8]: (t, g), (t + 4, g)
//   d  [16 x 8]: (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1)
__device__ inline void multiply_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace tfla_tk::decode
