// What the observation of operators costs: loops of tiny operators, with the observer that stage 3 installs and
// without, taking turns. Prints nanoseconds of processor time an operator beside the most that is wanted.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstdio>
#include <memory>

#include "ballast/params/fault.h"
#include "benchmarks/measure.h"

namespace {

constexpr double kMostNanoseconds = 1000;

/// A unit that is always there: what is left is the cost of finding out.
class Resident final : public ballast::FaultHandler {
 public:
  void touch_and_pin(int) noexcept override { ++touches; }
  void written(int, std::int64_t) noexcept override {}
  void unpin(int) noexcept override {}
  void touch_in_child(int) noexcept override {}
  std::int64_t touches = 0;
};

void compare(const char* name, int turns, std::int64_t operators, const std::function<void()>& loop) {
  using namespace ballast;
  const bench::Turns turn = bench::take_turns(turns, loop, [&] {
    const FaultObserver observer;
    loop();
  });
  const double plain = turn.base.cpu / static_cast<double>(operators) * 1e9;
  const double cost = (turn.other.cpu - turn.base.cpu) / static_cast<double>(operators) * 1e9;
  std::printf("%-44s %8.0f %10.0f %8.0f  %s\n", name, plain, cost, kMostNanoseconds,
              cost < kMostNanoseconds ? "reached" : "MISSED");
}

}  // namespace

int main(int argc, char** argv) {
  using namespace ballast;
  bench::Flags flags(argc, argv, "Cost of observing ATen operators, nanoseconds an operator.");
  const std::int64_t repeats = flags.number("repeats", 50'000, "operators a loop");
  const int turns = static_cast<int>(flags.number("turns", 21, "turns of each loop"));
  flags.finish();

  at::set_num_threads(1);
  const at::Tensor x = at::ones({4}), y = at::ones({4});
  Resident resident;
  FaultStorage storage(&resident, 0, at::ones({64}), "not mapped");
  storage.map();
  storage.flat().fill_(1);
  const at::Tensor weight = storage.flat().narrow(0, 0, 4);

  std::printf("%-44s %8s %10s %8s\n", "operator", "plain ns", "observed +", "most");
  compare("add_(x, y): ordinary tensors", turns, repeats, [&] {
    for (std::int64_t i = 0; i < repeats; ++i) x.add_(y);
  });
  compare("x.view({2, 2}): a view", turns, repeats, [&] {
    for (std::int64_t i = 0; i < repeats; ++i) x.view({2, 2});
  });
  compare("cat of 8: a list of tensors", turns, repeats, [&] {
    const std::vector<at::Tensor> list(8, y);
    for (std::int64_t i = 0; i < repeats; ++i) at::cat(list);
  });
  compare("add_(x, w): a parameter that is there", turns, repeats, [&] {
    for (std::int64_t i = 0; i < repeats; ++i) x.add_(weight);
  });
  compare("w.view({2, 2}): a view of a parameter", turns, repeats, [&] {
    for (std::int64_t i = 0; i < repeats; ++i) weight.view({2, 2});
  });
  if (resident.touches == 0) std::printf("the observer saw nothing: the figures above mean nothing\n");
  return resident.touches == 0;
}
