#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/version.h>

#include <cstdio>
#include <thread>

#include "ballast/kernels/kernels.h"
#include "cli/commands.h"

namespace ballast::cli {

int info() {
  std::printf("ballast   %s\n", BALLAST_VERSION);
  std::printf("LibTorch  %s, operators for %s, %d threads of %u cores\n", TORCH_VERSION,
              at::get_cpu_capability().c_str(), at::get_num_threads(), std::thread::hardware_concurrency());
  std::printf("optimizer %s (kernels for states in host memory)\n", kernels::instruction_set());
  std::printf("devices   cpu%s\n", at::hasCUDA() ? ", cuda" : " (built without CUDA)");
  return 0;
}

}  // namespace ballast::cli
