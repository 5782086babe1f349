#include "ballast/grads/gradient_store.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "tests/grads/units.h"

namespace ballast {
namespace {

const std::vector<TestParameter> kParameters{{"a.p", {3, 5}}, {"a.q", {7}}, {"b.p", {2}}};

struct Store {
  explicit Store(GradPolicy policy, c10::ScalarType compute = c10::kFloat, int rank = 0)
      : layout(layout_of(kParameters, 2, compute)), store(layout, policy, rank, ledger) {}
  at::Tensor slot(const at::Tensor& flat, int parameter) const {
    const Slot& place = layout.slot_of(parameter);
    return flat.narrow(0, place.offset, place.numel);
  }
  std::int64_t bytes(Tier tier) const { return ledger->cell(MemoryKind::kGrads, tier).now; }

  Layout layout;
  std::shared_ptr<Ledger> ledger = Ledger::create();
  GradientStore store;
};

TEST(GradientStore, ContributionsLieInTheirSlotsWithZerosBetween) {
  Store s(policy_of(2));
  const at::Tensor p = at::arange(15, at::kFloat).reshape({3, 5});
  s.store.contribute(0, p.t().contiguous().t());  // any strides
  EXPECT_TRUE(s.store.holds(0));
  EXPECT_FALSE(s.store.holds(1));
  EXPECT_FALSE(s.store.complete(0));
  EXPECT_TRUE(s.store.active(0));
  EXPECT_FALSE(s.store.active(1));
  s.store.contribute(1, at::ones({7}));
  EXPECT_TRUE(s.store.complete(0));
  EXPECT_FALSE(s.store.mixed(0));
  const at::Tensor taken = s.store.take(0);
  EXPECT_EQ(taken.numel(), s.layout.units[0].padded);
  EXPECT_TRUE(at::equal(s.slot(taken, 0), p.flatten()));
  EXPECT_TRUE(at::equal(s.slot(taken, 1), at::ones({7})));
  EXPECT_EQ(taken.sum().item<double>(), 105 + 7) << "zeros everywhere else";
  EXPECT_FALSE(s.store.holds(0));
  EXPECT_TRUE(s.store.active(0)) << "until the window ends";
  EXPECT_EQ(s.bytes(Tier::kDevice), 0);
}

TEST(GradientStore, ASecondContributionIsAddedInTheAccumulationDtype) {
  for (const auto accumulate : {at::kFloat, at::kBFloat16}) {
    GradPolicy policy = policy_of(1);
    policy.accumulate = accumulate;
    Store s(policy, at::kBFloat16);
    const auto bf16 = [](double value, at::IntArrayRef shape) { return at::full(shape, value, at::kBFloat16); };
    s.store.contribute(0, bf16(1, {3, 5}));
    EXPECT_EQ(s.store.local(0).scalar_type(), at::kBFloat16);
    EXPECT_EQ(s.bytes(Tier::kDevice), 2 * s.layout.units[0].padded);
    s.store.contribute(0, bf16(std::ldexp(1, -9), {3, 5}));
    s.store.contribute(1, bf16(3, {7}));  // its first, into the wider sum
    EXPECT_TRUE(s.store.mixed(0));
    const at::Tensor taken = s.store.take(0);
    EXPECT_EQ(taken.scalar_type(), accumulate);
    const double sum = accumulate == at::kFloat ? 1 + std::ldexp(1, -9) : 1;
    EXPECT_TRUE(at::all(s.slot(taken, 0) == sum).item<bool>());
    EXPECT_TRUE(at::all(s.slot(taken, 1) == 3).item<bool>());
    EXPECT_FALSE(s.store.mixed(0));
  }
}

TEST(GradientStore, SparseContributionsAreDense) {
  Store s(policy_of(2));
  const at::Tensor sparse =
      at::sparse_coo_tensor(at::tensor({1, 1}, at::kLong).reshape({1, 2}), at::ones({2, 5}, at::kFloat), {3, 5});
  s.store.contribute(0, sparse);
  const at::Tensor taken = s.slot(s.store.take(0), 0).reshape({3, 5});
  EXPECT_TRUE(at::equal(taken.sum(1), at::tensor({0.f, 10.f, 0.f})));
}

TEST(GradientStore, GradientsThatWaitForOthersOfTheirUnitAreCountedOnceAndReadAsIfTheyWereThere) {
  Store s(policy_of(2));
  const std::int64_t planned = 4 * s.layout.units[0].padded;
  const auto give = [&] { s.store.contribute(0, at::full({3, 5}, 2, at::kFloat)); };

  give();
  EXPECT_EQ(s.bytes(Tier::kDevice), planned);
  EXPECT_TRUE(s.store.holds(0));
  EXPECT_TRUE(at::all(s.slot(s.store.local(0), 0) == 2).item<bool>()) << "read";
  s.store.contribute(0, at::ones({3, 5}));
  EXPECT_TRUE(at::all(s.slot(s.store.take(0), 0) == 3).item<bool>()) << "added to";

  give();
  s.store.overwrite(0, at::full({3, 5}, 7, at::kFloat));
  EXPECT_EQ(s.store.take(0).sum().item<double>(), 0) << "overwritten";
  s.store.release(0);

  give();
  s.store.move(c10::kCPU, Tier::kHost);
  EXPECT_EQ(s.bytes(Tier::kHost), planned) << "moved";
  EXPECT_EQ(s.bytes(Tier::kDevice), 0);
  EXPECT_EQ(s.store.take(0).sum().item<double>(), 30);

  give();
  s.store.clear();
  EXPECT_EQ(s.bytes(Tier::kDevice), 0) << "dropped";
  s.store.contribute(1, at::ones({7}));
  EXPECT_EQ(s.store.take(0).sum().item<double>(), 7) << "nothing of the dropped one";
  EXPECT_EQ(s.ledger->cell(MemoryKind::kGrads, Tier::kDevice).peak, planned + 4 * s.layout.units[0].shard)
      << "the overwritten sum came on top";
}

TEST(GradientStore, AGradientInMemoryThatOthersOwnIsCopiedAtOnce) {
  const auto given = [](const at::Tensor& mine, at::Tensor gradient) {
    Store s(policy_of(2));
    s.store.contribute(0, std::move(gradient));
    mine.fill_(9);
    return s.slot(s.store.take(0), 0).sum().item<double>();
  };
  const at::Tensor kept = at::ones({3, 5});
  EXPECT_EQ(given(kept, kept), 15) << "the caller kept the tensor";
  const at::Tensor block = at::ones({40});
  EXPECT_EQ(given(block, block.narrow(0, 5, 15).view({3, 5})), 15) << "a part of a larger block";
}

// Pieces of one chunk of squares, so that a sum of several chunks lands in several pieces; on disk behind a ring that
// holds two of them.
struct HostStore {
  HostStore(GradPolicy policy, Tier tier, const std::vector<TestParameter>& parameters, int rank)
      : layout(layout_of(parameters, 2)),
        store(layout, policy, rank, ledger,
              std::make_unique<HostSums>(sizes(policy), policy.keep_whole_sum ? 2 : 1, c10::kCPU, options(tier), lane,
                                         ledger)) {}
  ~HostStore() {
    lane.run([&] { store.close(); });
  }
  static HostSums::Options options(Tier tier) {
    HostSums::Options options{.piece = kernels::kSquaresChunk};
    if (tier == Tier::kNvme)
      options.swap = tiers::SwapOptions{.nvme_path = std::filesystem::temp_directory_path(), .buffers = 2};
    return options;
  }
  std::vector<std::int64_t> sizes(const GradPolicy& policy) const {
    std::vector<std::int64_t> sizes;
    for (const Unit& unit : layout.units) sizes.push_back(policy.keep_whole_sum ? unit.padded : unit.shard);
    return sizes;
  }

  Layout layout;
  std::shared_ptr<Ledger> ledger = Ledger::create();
  tiers::HostLane lane{c10::kCPU, 1};
  GradientStore store;
};

TEST(GradientStore, SumsThatLandAddUpOnTheDevice) {
  for (int stage : {0, 2}) {
    Store s(policy_of(stage), at::kFloat, 1);
    const Range range = s.store.landed_range(0);
    EXPECT_EQ(range.begin, stage == 0 ? 0 : s.layout.units[0].shard);
    EXPECT_EQ(range.end, s.layout.units[0].padded);
    EXPECT_FALSE(s.store.has_landed(0));
    EXPECT_FALSE(s.store.landed(0).defined());
    s.store.land(0, at::ones({range.size()}));
    s.store.land(0, at::full({range.size()}, 2, at::kFloat));
    EXPECT_TRUE(at::all(s.store.landed(0) == 3).item<bool>());
    EXPECT_EQ(s.bytes(Tier::kDevice), 4 * range.size());
    s.store.release(0);
    EXPECT_FALSE(s.store.has_landed(0));
    EXPECT_FALSE(s.store.landed(0).defined());
    EXPECT_EQ(s.bytes(Tier::kDevice), 0);
  }
}

class OffDevice : public ::testing::TestWithParam<Tier> {};
INSTANTIATE_TEST_SUITE_P(GradientStore, OffDevice, ::testing::Values(Tier::kHost, Tier::kNvme),
                         [](const auto& tier) { return tier.param == Tier::kHost ? "Host" : "Nvme"; });

TEST_P(OffDevice, SumsAddUpInOnePlaceAndStartAnewAfterTheirRelease) {
  const std::int64_t n = 2 * (3 * kernels::kSquaresChunk + 100);
  for (int stage : {0, 2})
    for (c10::ScalarType type : {at::kFloat, at::kBFloat16}) {
      HostStore s(policy_of(stage), GetParam(), {{"a.p", {n}}, {"b.p", {2}}}, 1);
      const Range range = s.store.landed_range(0);
      const auto bytes = [&] { return s.ledger->cell(MemoryKind::kGrads, GetParam()).now; };
      const std::int64_t planned = bytes();
      const std::int64_t exact = 4 * (range.size() + s.store.landed_range(1).size());
      if (GetParam() == Tier::kHost) {
        EXPECT_EQ(planned, exact);
      }
      EXPECT_GE(planned, exact);  // on disk pieces are padded
      EXPECT_FALSE(s.store.landed(0).defined());
      for (double start : {1.0, 4.0}) {  // two windows
        const at::Tensor ramp = at::arange(range.size(), at::kFloat).remainder(13) + start;
        s.store.land(0, ramp.to(type));
        s.store.land(0, at::full({range.size()}, 2, type));
        EXPECT_TRUE(at::equal(s.store.landed(0), ramp + 2)) << "stage " << stage;
        s.lane.run([&] {  // as updates read it, in whatever parts
          for (const std::int64_t length : {std::int64_t{1000}, kernels::kSquaresChunk + 7, range.size()})
            for (std::int64_t begin = 0; begin < range.size(); begin += length) {
              const Range part{begin, std::min(begin + length, range.size())};
              s.store.landing(0).read(part, [&](const at::Tensor& values) {
                EXPECT_TRUE(at::equal(values, (ramp + 2).narrow(0, part.begin, part.size()))) << begin;
              });
            }
        });
        SquareSums here(2), want(2);
        s.store.add_squares(0, here);
        s.store.add_squares(1, here);  // nothing has landed there
        const std::int64_t shard = s.layout.units[0].shard;
        for (std::int64_t begin = 0; begin < range.size(); begin += shard)
          want.add((range.begin + begin) / shard, (ramp + 2).narrow(0, begin, shard));
        EXPECT_EQ(here.sums(), want.sums()) << "bit for bit what one pass over the whole sum gives";
        s.store.release(0);
        EXPECT_FALSE(s.store.has_landed(0));
      }
      EXPECT_EQ(bytes(), planned);
      EXPECT_EQ(s.ledger->total(Tier::kDevice).peak, 0);
    }
}

TEST_P(OffDevice, AnOverwrittenSumHasTheNewSquares) {
  HostStore s(policy_of(2), GetParam(), {{"a.p", {7}}}, 0);
  s.store.overwrite(0, at::full({7}, 2, at::kFloat));  // into a sum in which nothing has landed
  EXPECT_EQ(s.store.landed(0).sum().item<double>(), 14);
  s.store.release(0);
  s.store.land(0, at::full({s.store.landed_range(0).size()}, 1e20, at::kFloat));
  s.store.overwrite(0, at::full({7}, 3, at::kFloat));
  const Range padding{7, s.store.landed_range(0).size()};
  SquareSums squares(2);
  s.store.add_squares(0, squares);
  EXPECT_EQ(squares.sums()[0], 7 * 9.0 + static_cast<double>(padding.size()) * std::pow(double(1e20f), 2));
}

TEST(GradientStore, OverwriteReplacesWhatHasLandedAndWhatIsHeld) {
  for (int rank : {0, 1}) {
    Store s(policy_of(2), at::kFloat, rank);
    const Range range = s.store.landed_range(0);
    s.store.land(0, at::ones({range.size()}));
    s.store.contribute(0, at::full({3, 5}, 7, at::kFloat));
    s.store.contribute(1, at::full({7}, 7, at::kFloat));
    s.store.overwrite(1, at::full({7}, 5, at::kFloat));
    EXPECT_TRUE(at::all(s.slot(s.store.local(0), 0) == 7).item<bool>()) << "another parameter's";
    EXPECT_TRUE(at::all(s.slot(s.store.local(0), 1) == 0).item<bool>());
    const Slot& slot = s.layout.slot_of(1);
    const Range mine = intersect(range, {slot.offset, slot.offset + slot.numel});
    EXPECT_EQ(s.store.landed(0).sum().item<double>(), range.size() + 4 * std::max<std::int64_t>(mine.size(), 0));
    s.store.overwrite(2, at::full({2}, 5, at::kFloat));  // nobody had one
    EXPECT_TRUE(s.store.active(2));
  }
}

TEST(GradientStore, ClearDropsEverything) {
  Store s(policy_of(2));
  s.store.contribute(0, at::ones({3, 5}));
  s.store.land(1, at::ones({s.layout.units[1].shard}));
  s.store.clear();
  EXPECT_FALSE(s.store.holds(0));
  EXPECT_FALSE(s.store.landed(1).defined());
  EXPECT_FALSE(s.store.active(0));
  EXPECT_EQ(s.bytes(Tier::kDevice), 0);
}

}  // namespace
}  // namespace ballast
