// What every launcher has: the machine code of the kernels that it launches, and the two CUDA driver
// functions that tensor maps need, forwarded to the driver at run time. So a launcher needs no -lcuda: it
// links and loads on a machine that has no driver.
#include <cuda.h>
#include <cuda_runtime.h>

#include <fstream>
#include <iterator>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "common/launcher.h"
#include "common/loaded_kernel.h"

namespace tfla_tk {
namespace {

std::mutex loading;
std::unordered_map<std::string, cudaLibrary_t> library_of;  // by the symbol of a kernel

// Calls each(symbol) for the kernels of a cubin: the code of each is a section .text.<symbol>. The runtime
// would have to be asked for every symbol, and what fails then is an error to a debugger or a sanitizer.
template <class Each> void for_kernels_of(const char* cubin, Each each) {
    using namespace std::string_view_literals;
    constexpr std::string_view kBefore = "\0.text."sv;
    std::ifstream file(cubin, std::ios::binary);
    const std::string content{std::istreambuf_iterator<char>(file), {}};
    for (std::size_t at = content.find(kBefore); at != std::string::npos; at = content.find(kBefore, at + 1))
        each(std::string(content.c_str() + at + kBefore.size()));
}

}  // namespace

void load_kernels(const char* cubin) {
    cudaLibrary_t library;
    const cudaError_t status =
        cudaLibraryLoadFromFile(&library, cubin, nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (status != cudaSuccess)
        throw std::runtime_error(std::string(cubin) + " cannot be loaded: " + cudaGetErrorString(status));
    const std::lock_guard lock(loading);
    for_kernels_of(cubin, [&](std::string symbol) { library_of.emplace(std::move(symbol), library); });
}

namespace {

cudaKernel_t find(LoadedKernel& x, const char* name) {
    if (const cudaKernel_t known = x.kernel) return known;
    const char* symbol = nullptr;
    check_launch(cudaFuncGetName(&symbol, x.stub), name);
    const std::lock_guard lock(loading);
    const auto found = library_of.find(symbol);
    if (found == library_of.end())
        throw std::runtime_error(std::string(name) + ": no machine code is loaded of " + symbol);
    cudaKernel_t kernel;
    check_launch(cudaLibraryGetKernel(&kernel, found->second, symbol), name);
    return x.kernel = kernel;
}

}  // namespace

void launch_kernel(LoadedKernel& x, const void* arguments, dim3 grid, int threads, int shared_bytes,
                   int device, cudaStream_t stream, const char* name, int cluster) {
    constexpr int kPortable = 8;  // largest portable cluster size
    const cudaKernel_t kernel = find(x, name);
    if (shared_bytes > x.shared_bytes.at(device)) {
        check_launch(cudaKernelSetAttributeForDevice(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                     shared_bytes, device),
                     name);
        x.shared_bytes[device] = shared_bytes;
    }
    if (cluster > kPortable)
        check_launch(cudaKernelSetAttributeForDevice(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed,
                                                     1, device),
                     name);
    cudaLaunchAttribute of_cluster{};
    of_cluster.id = cudaLaunchAttributeClusterDimension;
    of_cluster.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = shared_bytes;
    config.stream = stream, config.attrs = &of_cluster, config.numAttrs = cluster > 1;
    void* pointers[] = {const_cast<void*>(arguments)};
    check_launch(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers), name);
}

}  // namespace tfla_tk

void tfla_load_kernels(const char* cubin) { tfla_tk::load_kernels(cubin); }

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
