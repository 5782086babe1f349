#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "ballast/tiers/disk_queue.h"
#include "tests/data/temporary_folder.h"

namespace ballast::tiers {

/// A kind of queue on a kind of file system.
struct Place {
  bool uring;
  bool memory;  // below /dev/shm, which is a tmpfs
};

class AtPlace : public ::testing::TestWithParam<Place> {
 protected:
  AtPlace() {
    if (GetParam().memory)
      folder_.emplace("/dev/shm");
    else
      folder_.emplace();
  }
  DiskOptions options(std::int64_t block = 1 << 16, int depth = 4) const {
    return {.block_size = block, .queue_depth = depth, .threads = 3, .uring = GetParam().uring};
  }
  std::filesystem::path file(const std::string& name = "swap.0") const { return folder_->path() / name; }

  std::optional<data::TemporaryFolder> folder_;
};

inline std::string place_name(const ::testing::TestParamInfo<Place>& info) {
  return std::string(info.param.uring ? "Uring" : "Threads") + (info.param.memory ? "InMemory" : "OnDisk");
}

inline const auto kPlaces =
    ::testing::Values(Place{true, false}, Place{true, true}, Place{false, false}, Place{false, true});

}  // namespace ballast::tiers
