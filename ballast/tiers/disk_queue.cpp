#include "ballast/tiers/disk_queue.h"

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

#include "ballast/base/log.h"
#include "ballast/tiers/testing.h"

namespace ballast {
namespace {

std::mutex wrapper_mutex;  // guards wrapper
testing::DiskQueueWrapper wrapper;

void say_once(int threads, const std::string& why_not) {
  static std::atomic<bool> said = false;
  if (!said.exchange(true))
    log_info("tiers: no io_uring (", why_not, "); swapping with ", threads, " threads of pread and pwrite");
}

}  // namespace

void testing::wrap_disk_queues(DiskQueueWrapper wrap) {
  const std::lock_guard lock(wrapper_mutex);
  wrapper = std::move(wrap);
}

tiers::DiskOptions tiers::disk_options(const AioConfig& config) {
  return {.block_size = config.block_size, .queue_depth = config.queue_depth, .threads = config.intra_op_parallelism};
}

std::unique_ptr<tiers::DiskQueue> tiers::make_disk_queue(const DiskFile& file, const DiskOptions& options) {
  std::string why_not;
  std::unique_ptr<DiskQueue> queue;
  if (options.uring) queue = make_uring_queue(file, options.queue_depth, why_not);
  if (!queue) {
    if (options.uring) say_once(options.threads, why_not);
    queue = make_thread_queue(file, options.queue_depth, options.threads);
  }
  const std::lock_guard lock(wrapper_mutex);
  return wrapper ? wrapper(std::move(queue), file.path()) : std::move(queue);
}

}  // namespace ballast
