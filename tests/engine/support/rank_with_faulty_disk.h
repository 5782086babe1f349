#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "ballast/tiers/testing.h"
#include "tests/tiers/faulty_disk.h"

namespace ballast::testing {

/// While it lives, one rank's swap file of that name follows the plan.
class RankWithFaultyDisk {
 public:
  RankWithFaultyDisk(int rank, const std::string& name, tiers::Plan plan) {
    const std::string mark = "-r" + std::to_string(rank) + "-";
    wrap_disk_queues([mark, name, plan](std::unique_ptr<tiers::DiskQueue> queue, const std::filesystem::path& file) {
      if (file.string().find(mark) == std::string::npos || file.filename() != name) return queue;
      return std::unique_ptr<tiers::DiskQueue>(std::make_unique<tiers::FaultyDisk>(std::move(queue), plan));
    });
  }
  ~RankWithFaultyDisk() { wrap_disk_queues({}); }
};

}  // namespace ballast::testing
