#include "ballast/grads/reducer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <random>

#include "ballast/base/error.h"
#include "ballast/comm/testing.h"
#include "tests/grads/units.h"

namespace ballast {
namespace {

using testing::run_ranks;
using testing::thread_options;

const std::vector<TestParameter> kParameters{
    {"a.p", {3, 5}}, {"a.q", {70}}, {"b.p", {2}}, {"leaf.e0", {9}}, {"leaf.e1", {9}}};

/// A reducer on one rank with what it works on.
struct Rank {
  Rank(const World& world, GradPolicy policy, c10::ScalarType compute = c10::kFloat)
      : layout(layout_of(kParameters, world.size(), compute)),
        rounds(world.communicator("agree", at::kCPU), Reducer::bits(layout),
               [this](int unit) { return layout.units[static_cast<std::size_t>(unit)].name; }),
        store(layout, policy, world.rank(), ledger),
        reducer(layout, policy, store, at::kCPU, world.communicator("reduce", at::kCPU), rounds, ledger),
        compute(compute) {}

  void contribute(int parameter, double value) {
    const ParameterInfo& info = layout.parameters[static_cast<std::size_t>(parameter)];
    reducer.on_gradient(parameter, at::full(info.shape, value, at::TensorOptions(compute)));
  }
  Agreed end_backward() {
    ++rounds.counts().backwards;
    return reducer.round(Call::kBackward, {.reduce = true, .backward_since_step = true});
  }
  Agreed step() {
    Agreed agreed;
    do {
      agreed = reducer.round(Call::kStep, {.reduce = true, .ends_window = true});
    } while (!agreed.all_arrived);
    return agreed;
  }
  /// Sum over ranks of one parameter so far; undefined if its unit has none.
  at::Tensor sum(int parameter) {
    const int unit = layout.unit_of(parameter).id;
    at::Tensor all = reducer.peek(unit);
    if (!all.defined()) return {};
    const Range range = store.landed_range(unit);
    const Slot& slot = layout.slot_of(parameter);
    const Range part = intersect(range, {slot.offset, slot.offset + slot.numel});
    return part.empty() ? at::empty({0}) : all.narrow(0, part.begin - range.begin, part.size());
  }
  void expect_sum(int parameter, double value) {
    const at::Tensor got = sum(parameter);
    ASSERT_TRUE(got.defined());
    EXPECT_TRUE(at::all(got == value).item<bool>())
        << layout.parameters[static_cast<std::size_t>(parameter)].name() << ": " << got;
  }

  Layout layout;
  std::shared_ptr<Ledger> ledger = Ledger::create();
  Rounds rounds;
  GradientStore store;
  Reducer reducer;
  c10::ScalarType compute;
};

// Ranks that took other branches: all reduce what any of them has.
TEST(Reducer, SumsWhatAnyRankHas) {
  for (int stage : {0, 1, 2, 3})
    for (bool overlap : {false, true})
      for (std::int64_t in_flight : {1, 1 << 20})
        run_ranks(
            3,
            [&](const World& world) {
              GradPolicy policy = policy_of(stage);
              policy.overlap = overlap;
              policy.max_in_flight = in_flight;
              Rank rank(world, policy);
              rank.reducer.begin_backward(false);
              for (int parameter : {2, 1, 0}) rank.contribute(parameter, world.rank() + 1);
              if (world.rank() != 1) rank.contribute(3, 10);
              if (stage >= 2) rank.end_backward();
              rank.reducer.begin_backward(false);
              if (world.rank() == 2) rank.contribute(0, 100);
              if (stage >= 2) rank.end_backward();
              const Agreed agreed = rank.step();
              EXPECT_EQ(agreed.active, (std::vector<bool>{true, true, true, true, false}));
              for (int unit : {0, 1, 2}) EXPECT_FALSE(rank.store.holds(unit));
              rank.expect_sum(0, 106);
              rank.expect_sum(1, 6);
              rank.expect_sum(2, 6);
              rank.expect_sum(3, 20);
              rank.expect_sum(4, 0);
            },
            thread_options());
}

TEST(Reducer, RanksWithFewerBackwardsJoinWithZeros) {
  for (bool overlap : {false, true})
    run_ranks(
        2,
        [&](const World& world) {
          GradPolicy policy = policy_of(2);
          policy.overlap = overlap;
          Rank rank(world, policy);
          for (int k = 0; k < 1 + 2 * world.rank(); ++k) {
            rank.reducer.begin_backward(false);
            rank.contribute(2, 1);
            if (k > 0) rank.contribute(1, 5);
            rank.end_backward();
          }
          const Agreed agreed = rank.step();
          EXPECT_EQ(agreed.most_backwards, 3);
          rank.expect_sum(2, 4);
          rank.expect_sum(1, 10);
        },
        thread_options());
}

TEST(Reducer, DeferredContributionsStayUntilARoundReducesThem) {
  run_ranks(
      2,
      [&](const World& world) {
        Rank rank(world, policy_of(2), at::kBFloat16);
        rank.reducer.begin_backward(true);
        EXPECT_FALSE(rank.reducer.reduces_at_backward());
        rank.contribute(2, 1);
        rank.reducer.begin_backward(true);
        rank.contribute(2, std::ldexp(1, -9));
        EXPECT_TRUE(rank.store.mixed(1));
        EXPECT_FALSE(rank.store.landed(1).defined());
        rank.expect_sum(2, 2 + std::ldexp(1, -8));  // a look moves nothing
        EXPECT_TRUE(rank.store.holds(1));
        rank.reducer.begin_backward(false);
        rank.contribute(2, 1);  // a third on top of the two held
        rank.end_backward();
        EXPECT_FALSE(rank.store.holds(1));
        rank.expect_sum(2, 4 + std::ldexp(1, -8));  // bf16 would have lost the small ones
      },
      thread_options());
}

TEST(Reducer, PeekIsUndefinedWhereNobodyHasAnything) {
  run_ranks(
      2,
      [](const World& world) {
        Rank rank(world, policy_of(2));
        rank.reducer.begin_backward(false);
        if (world.rank() == 0) rank.contribute(2, 1);
        rank.end_backward();
        EXPECT_FALSE(rank.sum(0).defined());
        rank.expect_sum(2, 1);
      },
      thread_options());
}

TEST(Reducer, CallsThatDifferAreErrorsThatTellThem) {
  for (int stage : {2, 3})
    run_ranks(
        2,
        [&](const World& world) {
          Rank rank(world, policy_of(stage));
          rank.reducer.begin_backward(false);
          rank.contribute(2, 1);
          rank.end_backward();
          const Call call = world.rank() == 0 ? Call::kStep : Call::kAccess;
          try {
            rank.reducer.round(call, {});
            ADD_FAILURE() << "ranks diverged and nobody noticed";
          } catch (const CommError& e) {
            for (const char* text : {"rank 0: step() after 1 backwards", "rank 1: access"})
              EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
          }
        },
        thread_options());
}

// What came in is what has landed plus what is pending, to the last integer, whatever the order of events.
TEST(Reducer, NothingIsLostOrCountedTwice) {
  for (int stage : {0, 1, 2})
    for (int seed = 0; seed < 20; ++seed)
      run_ranks(
          3,
          [&](const World& world) {
            GradPolicy policy = policy_of(stage);
            policy.overlap = seed % 2 == 0;
            policy.max_in_flight = seed % 3 == 0 ? 1 : 1 << 20;
            Rank rank(world, policy);
            std::mt19937 random(static_cast<unsigned>(seed));  // all ranks draw for all
            std::vector<double> in(kParameters.size(), 0);
            for (int backward = 0; backward < 6; ++backward) {
              const bool deferred = random() % 3 == 0;
              rank.reducer.begin_backward(deferred);
              for (int r = 0; r < world.size(); ++r)
                for (int p = static_cast<int>(kParameters.size()) - 1; p >= 0; --p)
                  for (unsigned times = random() % 3; times > 0; --times) {
                    const int value = static_cast<int>(random() % 9) - 4;
                    in[static_cast<std::size_t>(p)] += value;
                    if (r == world.rank()) rank.contribute(p, value);
                  }
              if (!deferred && stage >= 2) rank.end_backward();
              for (int p = 0; p < static_cast<int>(kParameters.size()); ++p) {
                const at::Tensor sum = rank.sum(p);
                if (sum.defined())
                  EXPECT_TRUE(at::all(sum == in[static_cast<std::size_t>(p)]).item<bool>())
                      << "stage " << stage << ", seed " << seed;
                else
                  EXPECT_EQ(in[static_cast<std::size_t>(p)], 0);
              }
            }
            rank.step();
            for (int p = 0; p < static_cast<int>(kParameters.size()); ++p)
              rank.expect_sum(p, in[static_cast<std::size_t>(p)]);
          },
          thread_options());
}

}  // namespace
}  // namespace ballast
