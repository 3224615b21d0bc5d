// The two CUDA driver functions that ThunderKittens calls by name, forwarded to the driver at run time.
// With them a kernel module needs no -lcuda: it links and imports on a machine that has no driver.
#include <cuda.h>
#include <cuda_runtime_api.h>

namespace {

// CUDA 12.0: the first release whose entry points both functions are written for
constexpr unsigned int DRIVER_API_VERSION = 12000;

void* driver_function(const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion(name, &function, DRIVER_API_VERSION, cudaEnableDefault, &found);
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) {
        cudaGetLastError();  // a missing driver is reported by the caller, not by the next launch
        return nullptr;
    }
    return function;
}

}  // namespace

extern "C" {

CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                        void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                                        const cuuint32_t* box, const cuuint32_t* element_strides,
                                        CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                        CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    static const auto forward =
        reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(driver_function("cuTensorMapEncodeTiled"));
    if (forward == nullptr) return CUDA_ERROR_STUB_LIBRARY;
    return forward(map, type, rank, address, dims, strides, box, element_strides, interleave, swizzle,
                   promotion, fill);
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
    static const auto forward =
        reinterpret_cast<decltype(&cuGetErrorString)>(driver_function("cuGetErrorString"));
    if (forward != nullptr) return forward(error, text);
    *text = "no CUDA driver is installed";
    return CUDA_ERROR_STUB_LIBRARY;
}

}  // extern "C"
