#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include "ballast/base/bytes.h"
#include "ballast/base/error.h"
#include "ballast/tiers/pin.h"

namespace ballast::tiers {

bool pin(void* data, std::size_t bytes, c10::Device device) {
  if (!device.is_cuda()) return false;
  const c10::cuda::CUDAGuard guard(device);  // else the driver makes a context on device 0 in every rank
  const cudaError_t error = ::cudaHostRegister(data, bytes, cudaHostRegisterPortable);
  if (error == cudaSuccess) return true;
  ::cudaGetLastError();  // it would come up again at the next kernel
  throw MemoryError("tiers.pin", "the driver refuses to page-lock host memory: ", ::cudaGetErrorString(error), " (",
                    format_bytes(static_cast<std::int64_t>(bytes)), ", ", device.str(),
                    "; set pin_memory to false, or raise the limit of locked memory)");
}

void unpin(void* data) noexcept {
  if (::cudaHostUnregister(data) != cudaSuccess) ::cudaGetLastError();  // at exit the driver may be gone already
}

}  // namespace ballast::tiers
