// Extents come back as they were written, whatever the block size, the depth and the order.
#include "ballast/tiers/swap_file.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include "ballast/base/error.h"
#include "ballast/tiers/testing.h"
#include "tests/tiers/aligned.h"
#include "tests/tiers/places.h"

namespace ballast::tiers {
namespace {

using data::error_text;

class Swap : public AtPlace {};

TEST_P(Swap, EveryBlockSizeAndDepthKeepsEveryByte) {
  const std::vector<std::int64_t> sizes{1, kDiskAlign, 300'000, 0, 65'536, 1'000'001};
  for (const std::int64_t block :
       {std::int64_t{4096}, std::int64_t{5000}, std::int64_t{65'536}, std::int64_t{8} << 20}) {
    for (const int depth : {1, 3, 64}) {
      SwapFile file(this->file(), sizes, options(block, depth));
      ASSERT_EQ(file.extents(), 6);
      EXPECT_EQ(file.padded_bytes(0), kDiskAlign);
      EXPECT_EQ(file.padded_bytes(2), 303'104);
      EXPECT_EQ(file.padded_bytes(3), 0);
      std::vector<Aligned> written, read;
      for (int e = 0; e < file.extents(); ++e) {
        written.emplace_back(file.padded_bytes(e), e + 1);
        read.emplace_back(file.padded_bytes(e), 99);
      }
      for (int e = 0; e < file.extents(); ++e) file.start_write(e, written[static_cast<std::size_t>(e)].span());
      file.finish_all();
      for (int e = 0; e < file.extents(); ++e) file.start_read(e, read[static_cast<std::size_t>(e)].span());
      for (int e = file.extents() - 1; e >= 0; --e) {
        file.finish(e);
        EXPECT_TRUE(written[static_cast<std::size_t>(e)] == read[static_cast<std::size_t>(e)])
            << "extent " << e << ", blocks of " << block << ", depth " << depth;
      }
    }
  }
  EXPECT_FALSE(std::filesystem::exists(this->file()));
}

TEST_P(Swap, AReadSeesTheWriteThatIsStillUnderWay) {
  SwapFile file(this->file(), {1 << 20, 1 << 20}, options(1 << 14, 2));
  const Aligned first(1 << 20, 1), second(1 << 20, 2), other(1 << 20, 3), read(1 << 20, 4);
  file.start_write(0, first.span());
  file.start_write(1, other.span());
  file.start_write(0, second.span());  // replaces the first, which is finished before
  file.start_read(0, read.span());
  file.finish(0);
  EXPECT_TRUE(read == second);
  file.start_read(1, read.span());
  file.finish(1);
  EXPECT_TRUE(read == other);
}

/// A pipeline over many extents, in random order, with a random number of operations under way.
TEST_P(Swap, RandomSchedulesReadWhatWasLastWritten) {
  constexpr int kExtents = 12;
  std::vector<std::int64_t> sizes;
  for (int e = 0; e < kExtents; ++e) sizes.push_back(1 + e * 7919);
  SwapFile file(this->file(), sizes, options(8192, 3));
  std::vector<Aligned> buffers, wanted;
  for (int e = 0; e < kExtents; ++e) {
    buffers.emplace_back(file.padded_bytes(e), e);
    wanted.emplace_back(file.padded_bytes(e), e);
    file.start_write(e, buffers.back().span());
  }
  std::vector<std::span<std::byte>> spans;
  for (const Aligned& buffer : buffers) spans.push_back(buffer.span());
  file.register_buffers(spans);
  std::minstd_rand random(7);
  std::vector<bool> reading(kExtents);
  for (int round = 0; round < 400; ++round) {
    const auto e = static_cast<std::size_t>(random() % kExtents);
    const int extent = static_cast<int>(e);
    if (reading[e] || random() % 3 == 0) {
      file.finish(extent);
      ASSERT_TRUE(!reading[e] || buffers[e] == wanted[e]) << "extent " << e << " in round " << round;
      reading[e] = false;
    } else if (random() % 2 == 0) {
      file.finish(extent);
      buffers[e].fill(static_cast<std::uint32_t>(round));
      wanted[e].fill(static_cast<std::uint32_t>(round));
      file.start_write(extent, buffers[e].span());
    } else {
      file.finish(extent);
      buffers[e].fill(1'000'000);
      file.start_read(extent, buffers[e].span());
      reading[e] = true;
    }
    if (round % 5 == 0) file.pump();
  }
  file.finish_all();
}

/// Counts the requests of each extent of 1 MiB that are in flight.
class Counting final : public DiskQueue {
 public:
  Counting(std::unique_ptr<DiskQueue> disk, std::vector<int>& most) : disk_(std::move(disk)), most_(most) {}
  const char* name() const noexcept override { return disk_->name(); }
  int depth() const noexcept override { return disk_->depth(); }
  int in_flight() const noexcept override { return disk_->in_flight(); }
  void submit(std::span<const DiskRequest> requests) override {
    for (const DiskRequest& request : requests) {
      const auto extent = static_cast<std::size_t>(request.offset >> 20);
      EXPECT_LE(request.bytes, 1 << 15);
      extents_[request.tag] = extent;
      most_[extent] = std::max(most_[extent], ++now_[extent]);
    }
    disk_->submit(requests);
  }
  std::optional<DiskCompletion> reap(bool wait) override {
    const auto completion = disk_->reap(wait);
    if (completion) --now_[extents_.at(completion->tag)];
    return completion;
  }

 private:
  std::unique_ptr<DiskQueue> disk_;
  std::vector<int>& most_;  // outlives the queue
  std::map<std::uint64_t, std::size_t> extents_;
  std::map<std::size_t, int> now_;
};

TEST_P(Swap, KeepsTheDepthOfEveryExtentInFlightAndNoMore) {
  std::vector<int> most(3);
  testing::wrap_disk_queues([&](std::unique_ptr<DiskQueue> disk, const std::filesystem::path&) {
    return std::make_unique<Counting>(std::move(disk), most);
  });
  {
    SwapFile file(this->file(), {1 << 20, 1 << 20, 1 << 15}, options(1 << 15, 5));
    const Aligned a(1 << 20, 1), b(1 << 20, 2), c(1 << 15, 3);
    file.start_write(0, a.span());
    file.start_write(1, b.span());
    file.start_write(2, c.span());
    file.finish_all();
  }
  testing::wrap_disk_queues({});
  EXPECT_EQ(most, (std::vector<int>{5, 5, 1}));
}

TEST_P(Swap, WrongUseIsRefusedAndHarmsNothing) {
  SwapFile file(this->file(), {5000, 5000}, options());
  const Aligned data(8192, 1), read(8192, 2), longer(12288, 3);
  const auto refusal = [&](auto fn) { return error_text<UseError>(*folder_, fn); };
  EXPECT_EQ(refusal([&] { file.start_read(0, read.span()); }),
            "[tiers.start_read] the extent was never written (extent 0)");
  EXPECT_EQ(refusal([&] { file.start_write(2, data.span()); }),
            "[tiers.start_write] no such extent (2 of 2, DIR/swap.0)");
  EXPECT_EQ(refusal([&] { file.start_write(0, data.span().first(5000)); }),
            "[tiers.start_write] wrong buffer length (got 5000, want 8192 bytes; extent 0, DIR/swap.0)");
  EXPECT_EQ(refusal([&] { file.start_write(0, longer.span().subspan(512, 8192)); }),
            "[tiers.start_write] the buffer isn't aligned (to 4096 bytes; extent 0)");
  file.start_write(0, data.span());
  file.start_read(0, read.span());
  EXPECT_EQ(refusal([&] { file.start_read(0, read.span()); }),
            "[tiers.start_read] the extent is being read (extent 0; call finish() first)");
  EXPECT_EQ(refusal([&] { file.start_write(0, data.span()); }),
            "[tiers.start_write] the extent is being read (extent 0; call finish() first)");
  file.finish(0);
  EXPECT_TRUE(read == data);
  file.finish(1);  // nothing to do
}

TEST_P(Swap, MayDieWithOperationsUnderWay) {
  const Aligned data(1 << 20, 1), read(1 << 20, 2);
  {
    SwapFile file(this->file(), {1 << 20, 1 << 20}, options(4096, 2));
    file.start_write(0, data.span());
    file.finish(0);
    file.start_read(0, read.span());
    file.start_write(1, data.span());
  }
  EXPECT_FALSE(std::filesystem::exists(this->file()));
}

int descriptors() { return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {})); }
int threads() { return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/task"), {})); }

TEST_P(Swap, LeavesNoDescriptorAndNoThread) {
  const Aligned data(1 << 16, 1), read(1 << 16, 2);
  const int descriptors_before = descriptors(), threads_before = threads();
  for (int round = 0; round < 20; ++round) {
    SwapFile file(this->file(), {1 << 16}, options());
    file.start_write(0, data.span());
    file.start_read(0, read.span());
    if (round % 2 == 0) file.finish(0);
  }
  EXPECT_EQ(descriptors(), descriptors_before);
  // A thread that has been joined stays in the list for a moment; one of an earlier test may have been counted before.
  for (int i = 0; i < 5000 && threads() > threads_before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_LE(threads(), threads_before);
}

TEST_P(Swap, WithoutExtentsIsAnEmptyFile) {
  SwapFile file(this->file(), {}, options());
  EXPECT_EQ(file.bytes(), 0);
  EXPECT_EQ(file.extents(), 0);
  file.finish_all();
  file.pump();
}

INSTANTIATE_TEST_SUITE_P(Places, Swap, kPlaces, place_name);

}  // namespace
}  // namespace ballast::tiers
