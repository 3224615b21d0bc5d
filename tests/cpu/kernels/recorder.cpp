// Stands for kernels/common/loaded_kernels.cpp and for the CUDA runtime: a launcher that is linked with it
// launches nothing, but notes which kernels it would launch. Needs no GPU.
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <map>

#include "common/launcher.h"
#include "common/loaded_kernel.h"

namespace {

std::map<const void*, std::string>& symbols() {  // by the host functions that stand for kernels
    static std::map<const void*, std::string> all;
    return all;
}

std::string launched;  // symbols, each with a line break

}  // namespace

// Names of instances and host functions of their kernels, which the launcher's source has a table of.
using Table = std::vector<std::pair<const char*, const void*>>;
extern const Table kernels_of_instances;

namespace tfla_tk {

void launch_kernel(LoadedKernel& x, const void*, dim3 grid, int threads, int, int, cudaStream_t,
                   const char* name, int cluster) {
    if (grid.x % cluster != 0 || grid.y > 65535 || threads > 1024)
        throw std::runtime_error(std::string(name) + ": CUDA would refuse this grid");
    launched += symbols().at(x.stub) + "\n";
}

}  // namespace tfla_tk

extern "C" {

#define PUBLIC __attribute__((visibility("default")))

void tfla_load_kernels(const char*) {}

// What was launched since the last call.
PUBLIC const char* recorded_launches() {
    static std::string told;
    told.clear(), told.swap(launched);
    return told.c_str();
}

// Lines of the symbol of a kernel and the name of its instance.
PUBLIC const char* recorded_kernels() {
    static std::string told;
    for (const auto& [instance, stub] : kernels_of_instances)
        told += symbols().at(stub) + " " + instance + "\n";
    return told.c_str();
}

// The symbol of the tfla_tk::LoadedKernel that lies at this place of the library.
PUBLIC const char* recorded_symbol(std::size_t place) {
    Dl_info library;
    dladdr(reinterpret_cast<const void*>(&recorded_launches), &library);
    const auto* address = static_cast<const char*>(library.dli_fbase) + place;
    return symbols().at(reinterpret_cast<const tfla_tk::LoadedKernel*>(address)->stub).c_str();
}

// The CUDA runtime

void** __cudaRegisterFatBinary(void*) { return new void*; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
    symbols()[host] = device;
}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, struct CUstream_st*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorNotSupported; }
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
    return cudaErrorNotSupported;
}
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 132, cudaSuccess; }
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "refused"; }

// What the driver asks of a tensor map.
CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t rank, void* address,
                                        const cuuint64_t* dims, const cuuint64_t* strides,
                                        const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                                        CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    bool good =
        rank >= 1 && rank <= 5 && address != nullptr && reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
    for (cuuint32_t n = 0; n < rank; n++)
        good = good && dims[n] >= 1 && dims[n] <= cuuint64_t{1} << 32 && box[n] >= 1 && box[n] <= 256;
    for (cuuint32_t n = 0; n + 1 < rank; n++)
        good = good && strides[n] % 16 == 0 && strides[n] < cuuint64_t{1} << 40;
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult CUDAAPI cuGetErrorString(CUresult, const char** text) {
    return *text = "a tensor map that the driver would refuse", CUDA_SUCCESS;
}

}  // extern "C"
