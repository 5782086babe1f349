#include "ballast/comm/testing.h"

#include <ATen/Parallel.h>

#include <exception>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "ballast/base/error.h"

namespace ballast::testing {

WorldOptions test_options() {
  WorldOptions options;
  options.device = "cpu";
  options.timeout = std::chrono::seconds(60);
  return options;
}

void run_ranks(int n, const std::function<void(const World&)>& fn, const WorldOptions& options) {
  at::set_num_threads(1);  // new threads start with the last value set anywhere
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(n);
  std::vector<char> is_comm_error(n, false);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < n; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        at::set_num_threads(1);
        fn(World::from_store(store, rank, n, options));
      } catch (const CommError&) {
        errors[rank] = std::current_exception();
        is_comm_error[rank] = true;
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const bool consequences : {false, true}) {
    for (int rank = 0; rank < n; ++rank) {
      if (errors[rank] && is_comm_error[rank] == consequences) std::rethrow_exception(errors[rank]);
    }
  }
}

}  // namespace ballast::testing
