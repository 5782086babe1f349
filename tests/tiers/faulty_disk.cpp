#include "tests/tiers/faulty_disk.h"

#include <thread>

#include "ballast/tiers/testing.h"

namespace ballast::tiers {

void FaultyDisk::submit(std::span<const DiskRequest> requests) {
  for (DiskRequest request : requests) {
    const Fault fault = plan_(request);
    switch (fault.kind) {
      case Fault::Kind::kError:
        failed_.push_back({.tag = request.tag, .result = -fault.value});
        continue;
      case Fault::Kind::kShort:
        if (fault.value == 0) {
          failed_.push_back({.tag = request.tag, .result = 0});
          continue;
        }
        request.bytes = std::min(request.bytes, fault.value);
        break;
      case Fault::Kind::kFlip:
        flips_[request.tag] = {request.data, fault.value};
        break;
      case Fault::Kind::kSlow:
        std::this_thread::sleep_for(std::chrono::milliseconds(fault.value));
        break;
      case Fault::Kind::kNone:
        break;
    }
    disk_->submit({&request, 1});
  }
}

std::optional<DiskCompletion> FaultyDisk::reap(bool wait) {
  if (!failed_.empty()) {
    const DiskCompletion completion = failed_.front();
    failed_.pop_front();
    return completion;
  }
  const auto completion = disk_->reap(wait);
  if (!completion) return completion;
  if (const auto found = flips_.find(completion->tag); found != flips_.end()) {
    const Flip flip = found->second;
    flip.data[flip.bit / 8] ^= static_cast<std::byte>(1 << (flip.bit % 8));
    flips_.erase(found);
  }
  return completion;
}

FaultyDisks::FaultyDisks(Plan plan) {
  testing::wrap_disk_queues([plan = std::move(plan)](std::unique_ptr<DiskQueue> disk, const std::filesystem::path&) {
    return std::make_unique<FaultyDisk>(std::move(disk), plan);
  });
}

FaultyDisks::~FaultyDisks() { testing::wrap_disk_queues({}); }

}  // namespace ballast::tiers
