#include "ballast/comm/testing.h"

#include <ATen/Parallel.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "ballast/base/error.h"

namespace ballast::testing {

namespace {

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

// One world for all tests of a launched process: a second rendezvous on the launcher's port would race with the end of
// the first.
const World& launched_world(const WorldOptions& options) {
  static const World world = World::from_env(options);
  return world;
}

int launched_ranks() { return std::stoi(variable("WORLD_SIZE", "1")); }

void run_as_launched(int n, int size, const std::function<void(const World&)>& fn, const WorldOptions& options) {
  if (n == size) {
    fn(launched_world(options));
  } else if (n == 1) {
    fn(World::single(options));
  } else {
    std::printf("skip: this part wants %d ranks and was launched on %d processes\n", n, size);
  }
}

}  // namespace

WorldOptions test_options() {
  WorldOptions options;
  options.device = variable("BALLAST_TEST_DEVICE", "cpu");
  options.backend = variable("BALLAST_TEST_BACKEND", "auto");
  options.timeout = std::chrono::seconds(60);
  return options;
}

WorldOptions thread_options() {
  WorldOptions options = test_options();
  const bool threads = launched_ranks() == 1 && options.device == "cpu" && options.backend == "auto";
  if (threads) options.backend = "threads";
  return options;
}

bool runs_in_one_world(int n) { return launched_ranks() == 1 || launched_ranks() == n; }

void run_ranks(int n, const std::function<void(const World&)>& fn, const WorldOptions& options) {
  at::set_num_threads(1);  // new threads start with the last value set anywhere
  if (const int size = launched_ranks(); size > 1) return run_as_launched(n, size, fn, options);
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
