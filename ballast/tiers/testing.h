#pragma once

#include <filesystem>
#include <functional>
#include <memory>

#include "ballast/tiers/disk_queue.h"

namespace ballast::testing {

/// Puts something (a queue that fails) in front of the queue of a file.
using DiskQueueWrapper = std::function<std::unique_ptr<tiers::DiskQueue>(std::unique_ptr<tiers::DiskQueue> queue,
                                                                         const std::filesystem::path& file)>;

/// Every queue that this process makes from now on passes through `wrap`; an empty one ends that.
void wrap_disk_queues(DiskQueueWrapper wrap);

}  // namespace ballast::testing
