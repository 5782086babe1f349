// A ring in front of a swap file never shows anything but what was last written, whatever is read ahead, kept, promised
// and dropped.
#include "ballast/tiers/swap_ring.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "ballast/base/error.h"
#include "ballast/tiers/host_lane.h"
#include "tests/data/temporary_folder.h"
#include "tests/tiers/places.h"

namespace ballast::tiers {
namespace {

class Ring : public AtPlace {
 protected:
  SwapOptions options(int buffers, bool read_ahead = true, bool write_behind = true) const {
    return {.nvme_path = folder_->path(),
            .disk = AtPlace::options(),
            .buffers = buffers,
            .read_ahead = read_ahead,
            .write_behind = write_behind};
  }
  bool folder_is_empty() const { return std::filesystem::is_empty(folder_->path()); }
};

std::uint8_t* bytes_of(const at::Tensor& tensor) { return static_cast<std::uint8_t*>(tensor.mutable_data_ptr()); }

TEST_P(Ring, ShowsWhatWasLastWrittenInAnyOrderOfCalls) {
  const std::vector<std::int64_t> sizes{1, 4096, 300'001, 70'000, 65'536, 9, 123'456};
  for (const int buffers : {2, 3, 5, 9})
    for (const bool read_ahead : {false, true})
      for (const bool write_behind : {false, true}) {
        SwapRing ring("state.swap", sizes, options(buffers, read_ahead, write_behind), c10::kCPU, 0);
        std::vector<std::uint8_t> value(sizes.size(), 0);  // of all bytes of an extent
        std::mt19937 random(static_cast<unsigned>(buffers));
        for (int round = 0; round < 300; ++round) {
          const auto e = random() % sizes.size();
          const int extent = static_cast<int>(e);
          for (auto n = random() % 3; n > 0; --n) ring.expect(static_cast<int>(random() % sizes.size()));
          const auto kind = random() % 6;
          const bool zeros = kind == 0, undefined = kind == 1, changed = zeros || undefined || random() % 2 == 0;
          const at::Tensor bytes = zeros       ? ring.open_zeros(extent)
                                   : undefined ? ring.open_new(extent)
                                               : ring.open(extent);
          ASSERT_EQ(bytes.numel(), sizes[e]);
          const std::uint8_t want = zeros ? 0 : value[e];
          ASSERT_TRUE(undefined ||
                      std::all_of(bytes_of(bytes), bytes_of(bytes) + sizes[e], [&](auto b) { return b == want; }))
              << "extent " << extent << ", round " << round << ", " << buffers << " buffers";
          if (changed) std::fill_n(bytes_of(bytes), sizes[e], value[e] = static_cast<std::uint8_t>(random()));
          if (random() % 4 == 0) ring.expect(static_cast<int>((e + 1) % sizes.size()));
          ring.close(extent, changed);
        }
      }
  EXPECT_TRUE(folder_is_empty());
}

TEST_P(Ring, SeveralAreOpenAtATimeButNoMoreThanThereAreBuffers) {
  SwapRing ring("state.swap", {100, 200, 300}, options(2), c10::kCPU, 0);
  std::fill_n(bytes_of(ring.open(0)), 100, 7);
  std::fill_n(bytes_of(ring.open(1)), 200, 8);
  EXPECT_THROW(ring.open(2), UseError);
  ring.close(0, true);
  EXPECT_EQ(bytes_of(ring.open(2))[299], 0);
  ring.close(2, false);
  ring.close(1, false);  // not changed: what was written to it may come back or not, but on disk it is as before
  EXPECT_EQ(bytes_of(ring.open(0))[99], 7);
  ring.close(0, false);
}

TEST_P(Ring, APromiseIsKeptWhileOtherBuffersAreFree) {
  SwapRing ring("state.swap", {100, 100, 100, 100}, options(3), c10::kCPU, 0);
  for (int extent = 0; extent < 4; ++extent) {
    std::fill_n(bytes_of(ring.open(extent)), 100, static_cast<std::uint8_t>(extent + 1));
    ring.close(extent, true);
  }
  std::vector<const void*> promised;
  for (const int extent : {0, 1, 2}) {
    promised.push_back(bytes_of(ring.open(extent)));
    ring.close(extent, false);
    ring.expect(extent);
  }
  ring.expect(3);  // no buffer left that nobody was promised
  for (const int extent : {0, 1, 2}) {
    const at::Tensor bytes = ring.open(extent);
    EXPECT_EQ(bytes_of(bytes), promised[static_cast<std::size_t>(extent)]);
    EXPECT_EQ(bytes_of(bytes)[99], extent + 1);
    ring.close(extent, false);
  }
  ring.expect(0);
  EXPECT_EQ(bytes_of(ring.open(3))[99], 4);
  EXPECT_EQ(bytes_of(ring.open(0)), promised[0]);
  ring.close(3, false);
  ring.close(0, false);
}

TEST(RingBytes, AreThoseThatItTakes) {
  const auto bytes = SwapRing::bytes_of({1, 5000, 4096}, 3);
  EXPECT_EQ(bytes.file, 4096 + 8192 + 4096);
  EXPECT_EQ(bytes.buffers, 3 * 8192);
}

INSTANTIATE_TEST_SUITE_P(Places, Ring, kPlaces, place_name);

}  // namespace
}  // namespace ballast::tiers
