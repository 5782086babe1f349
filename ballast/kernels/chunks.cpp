#include "ballast/kernels/chunks.h"

#include <cfenv>

namespace ballast::kernels {
namespace {

class DefaultEnvironment {
 public:
  DefaultEnvironment() noexcept {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultEnvironment() { std::fesetenv(&saved_); }
  DefaultEnvironment(const DefaultEnvironment&) = delete;
  DefaultEnvironment& operator=(const DefaultEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace

void run_chunks(std::int64_t chunks, int threads, ChunkBody body, const void* context) noexcept {
  const int workers = static_cast<int>(std::min<std::int64_t>(threads, chunks));
  if (workers <= 1) {
    const DefaultEnvironment environment;
    for (std::int64_t i = 0; i < chunks; ++i) body(context, i);
    return;
  }
#pragma omp parallel num_threads(workers)
  {
    const DefaultEnvironment environment;
#pragma omp for schedule(static)
    for (std::int64_t i = 0; i < chunks; ++i) body(context, i);
  }
}

}  // namespace ballast::kernels
