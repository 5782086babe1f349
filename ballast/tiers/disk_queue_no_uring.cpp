#include "ballast/tiers/disk_queue.h"

namespace ballast::tiers {

std::unique_ptr<DiskQueue> make_uring_queue(const DiskFile&, int, std::string& why_not) {
  why_not = "built without liburing";
  return nullptr;
}

}  // namespace ballast::tiers
