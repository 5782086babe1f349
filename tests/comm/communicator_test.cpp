#include "ballast/comm/communicator.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ballast/base/error.h"
#include "ballast/comm/testing.h"

namespace ballast {
namespace {

using testing::run_ranks;

/// Element i of rank r's data, for any dtype (bool included).
at::Tensor pattern(int rank, std::int64_t n, at::ScalarType dtype) {
  return (at::arange(n, at::kLong) * 3 + rank * 5).remainder(13).to(dtype);
}

at::Tensor zeros(std::int64_t n, at::ScalarType dtype) { return at::zeros({n}, at::TensorOptions().dtype(dtype)); }

struct Shape {
  int ranks;
  std::int64_t length;
};
void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.ranks << " ranks, " << shape.length; }

class Collectives : public ::testing::TestWithParam<Shape> {};

TEST_P(Collectives, AllGatherPutsEveryRanksPartInRankOrder) {
  run_ranks(GetParam().ranks, [n = GetParam().length](const World& world) {
    const auto comm = world.communicator("gather", at::kCPU);
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                             at::kChar, at::kByte, at::kBool, at::kComplexFloat, at::kFloat8_e4m3fn}) {
      const at::Tensor out = zeros(n * world.size(), dtype);
      comm->all_gather(out, pattern(world.rank(), n, dtype), "test").wait();
      std::vector<at::Tensor> parts;
      for (int rank = 0; rank < world.size(); ++rank) parts.push_back(pattern(rank, n, dtype));
      EXPECT_TRUE(at::equal(out.view(at::kByte), at::cat(parts).view(at::kByte))) << dtype << ", rank " << world.rank();
    }
  });
}

TEST_P(Collectives, AllGatherTakesItsOwnSliceOfTheOutput) {
  run_ranks(GetParam().ranks, [n = GetParam().length](const World& world) {
    const auto comm = world.communicator("gather", at::kCPU);
    const at::Tensor out = zeros(n * world.size(), at::kFloat);
    const at::Tensor mine = out.narrow(0, world.rank() * n, n);
    mine.copy_(pattern(world.rank(), n, at::kFloat));
    comm->all_gather(out, mine, "test").wait();
    for (int rank = 0; rank < world.size(); ++rank) {
      EXPECT_TRUE(at::equal(out.narrow(0, rank * n, n), pattern(rank, n, at::kFloat))) << rank;
    }
  });
}

TEST_P(Collectives, AllToAllTransposesRanksAndSlices) {
  run_ranks(GetParam().ranks, [n = GetParam().length](const World& world) {
    const auto comm = world.communicator("reduce", at::kCPU);
    const int size = world.size();
    std::vector<at::Tensor> to, from;
    for (int peer = 0; peer < size; ++peer) {
      to.push_back(pattern(world.rank() * size + peer, n, at::kBFloat16));
      from.push_back(pattern(peer * size + world.rank(), n, at::kBFloat16));
    }
    const at::Tensor out = zeros(n * size, at::kBFloat16), in = at::cat(to);
    comm->all_to_all(out, in, "test").wait();
    EXPECT_TRUE(at::equal(out, at::cat(from))) << "rank " << world.rank();
    EXPECT_TRUE(at::equal(in, at::cat(to))) << "input changed, rank " << world.rank();
  });
}

TEST_P(Collectives, BroadcastTakesEveryRootsValues) {
  run_ranks(GetParam().ranks, [n = GetParam().length](const World& world) {
    const auto comm = world.communicator("init", at::kCPU);
    for (int root = 0; root < world.size(); ++root) {
      const at::Tensor data = pattern(world.rank(), n, at::kInt);
      comm->broadcast(data, root, "test").wait();
      EXPECT_TRUE(at::equal(data, pattern(root, n, at::kInt))) << "root " << root << ", rank " << world.rank();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, Collectives,
                         ::testing::Values(Shape{1, 5}, Shape{2, 0}, Shape{2, 1}, Shape{2, 1000003}, Shape{3, 7},
                                           Shape{4, 0}, Shape{4, 4096}, Shape{7, 13}));

TEST(Communicator, CollectivesOverlapAndSeveralCommunicatorsInterleave) {
  run_ranks(3, [](const World& world) {
    const auto gather = world.communicator("gather", at::kCPU), reduce = world.communicator("reduce", at::kCPU);
    constexpr std::int64_t kLength = 5000;
    constexpr int kRounds = 20;
    std::vector<at::Tensor> gathered, reduced;
    std::vector<PendingCollective> gathers, reductions;
    for (int round = 0; round < kRounds; ++round) {
      gathered.push_back(zeros(kLength * 3, at::kLong));
      gathers.push_back(gather->all_gather(gathered.back(), pattern(round + world.rank(), kLength, at::kLong), "g"));
      reduced.push_back(zeros(kLength * 3, at::kLong));
      reductions.push_back(
          reduce->all_to_all(reduced.back(), pattern(round * 7 + world.rank(), kLength * 3, at::kLong), "r"));
      EXPECT_TRUE(gathers.back().pending());
    }
    for (int round = kRounds - 1; round >= 0; --round) {  // in another order than launched
      reductions[round].wait();
      gathers[round].wait();
      EXPECT_FALSE(gathers[round].pending());
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_TRUE(
            at::equal(gathered[round].narrow(0, rank * kLength, kLength), pattern(round + rank, kLength, at::kLong)));
        EXPECT_TRUE(
            at::equal(reduced[round].narrow(0, rank * kLength, kLength),
                      pattern(round * 7 + rank, kLength * 3, at::kLong).narrow(0, world.rank() * kLength, kLength)));
      }
    }
  });
}

TEST(Communicator, ADroppedHandleFinishesItsCollective) {
  run_ranks(2, [](const World& world) {
    const auto comm = world.communicator("gather", at::kCPU);
    const at::Tensor first = zeros(20000, at::kFloat), second = zeros(2, at::kFloat);
    { auto dropped = comm->all_gather(first, pattern(world.rank(), 10000, at::kFloat), "dropped"); }
    PendingCollective handle = comm->all_gather(second, pattern(world.rank(), 1, at::kFloat), "assigned over");
    handle = PendingCollective();
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(at::equal(first.narrow(0, rank * 10000, 10000), pattern(rank, 10000, at::kFloat)));
      EXPECT_TRUE(at::equal(second.narrow(0, rank, 1), pattern(rank, 1, at::kFloat)));
    }
  });
}

TEST(Communicator, TensorsOutliveTheirOwners) {
  run_ranks(2, [](const World& world) {
    const auto comm = world.communicator("gather", at::kCPU);
    const at::Tensor out = zeros(2000000, at::kFloat);
    PendingCollective pending;
    {
      const at::Tensor in = pattern(world.rank(), 1000000, at::kFloat);
      pending = comm->all_gather(out, in, "test");
    }
    const at::Tensor elsewhere = at::ones({1000000});  // would reuse in's memory
    pending.wait();
    EXPECT_TRUE(at::equal(out.narrow(0, 1000000, 1000000), pattern(1, 1000000, at::kFloat)));
  });
}

TEST(Communicator, TakesLeafParametersWithoutTouchingAutograd) {
  run_ranks(2, [](const World& world) {
    const auto comm = world.communicator("init", at::kCPU);
    at::Tensor parameter = pattern(world.rank(), 6, at::kFloat).view({2, 3}).requires_grad_();
    const auto version = parameter._version();
    comm->broadcast(parameter, 1, "parameter").wait();
    EXPECT_TRUE(at::equal(parameter, pattern(1, 6, at::kFloat).view({2, 3})));
    EXPECT_TRUE(parameter.is_leaf() && parameter.requires_grad());
    EXPECT_EQ(parameter._version(), version);
  });
}

template <class E>
std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(Communicator, WrongTensorsAreRefusedWithTheirValues) {
  run_ranks(2, [](const World& world) {
    const auto comm = world.communicator("gather", at::kCPU);
    const at::Tensor two = zeros(2, at::kFloat), three = zeros(3, at::kFloat), four = zeros(4, at::kFloat);
    EXPECT_EQ(text_of<UseError>([&] { comm->all_gather(three, two, "unit a"); }),
              "[comm.all_gather] out must hold every rank's in (got 3, want 4 elements: 2 ranks of 2; unit a)");
    EXPECT_EQ(text_of<UseError>([&] { comm->all_gather(four, two.to(at::kHalf), "unit a"); }),
              "[comm.all_gather] out and in differ in dtype (got Float, want Half ; unit a)");
    EXPECT_EQ(text_of<UseError>([&] {
                comm->all_gather(zeros(8, at::kFloat).view({4, 2}).select(1, 0), two, "a");
              }),
              "[comm.all_gather] out is not contiguous (sizes [4], strides [2]; a)");
    EXPECT_EQ(text_of<UseError>([&] { comm->all_gather(at::Tensor(), two, "a"); }),
              "[comm.all_gather] out is an undefined tensor (a)");
    EXPECT_EQ(text_of<UseError>([&] { comm->all_gather(four, at::empty({2}, at::kMeta), "a"); }),
              "[comm.all_gather] in is on another device than the communicator (got meta, want cpu; a)");
    EXPECT_NE(text_of<UseError>([&] { comm->all_gather(four, four.narrow(0, 1, 2), "a"); }).find("overlaps"),
              std::string::npos);
    EXPECT_NE(text_of<UseError>([&] { comm->all_to_all(four, four, "a"); }).find("overlap"), std::string::npos);
    EXPECT_EQ(text_of<UseError>([&] { comm->all_to_all(three, zeros(3, at::kFloat), "a"); }),
              "[comm.all_to_all] elements don't divide by the ranks (got 1, want 0 left of 3 over 2 ranks; a)");
    EXPECT_EQ(text_of<UseError>([&] { comm->broadcast(four, 2, "a"); }),
              "[comm.broadcast] no such root (root 2, 2 ranks; a)");
    // Nothing has travelled: the ranks are still in step.
    comm->all_gather(four, pattern(world.rank(), 2, at::kFloat), "a").wait();
    EXPECT_TRUE(at::equal(four.narrow(0, 2, 2), pattern(1, 2, at::kFloat)));
  });
}

TEST(RunRanks, RethrowsTheCauseRatherThanItsConsequences) {
  EXPECT_EQ(text_of<std::runtime_error>([] {
              run_ranks(3, [](const World& world) {
                const auto comm = world.communicator("gather", at::kCPU);
                if (world.rank() == 2) throw std::runtime_error("cause");
                comm->all_gather(zeros(3, at::kFloat), zeros(1, at::kFloat), "test").wait();
              });
            }),
            "cause");
}

}  // namespace
}  // namespace ballast
