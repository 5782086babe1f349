#include "ballast/engine/save_job.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/base/math.h"
#include "ballast/tiers/bounce_buffer.h"
#include "ballast/tiers/host_arena.h"

namespace ballast {
namespace {

struct GivenUp {};  // another rank has the error

// For ranks that end together, none of which waits for the others.
constexpr std::chrono::seconds kLastWait{5};

}  // namespace

SaveJob::~SaveJob() {
  ending_.store(true, std::memory_order_relaxed);
  if (thread_.joinable()) thread_.join();
  if (!error_) return;  // or somebody has been told
  try {
    std::rethrow_exception(error_);
  } catch (const std::exception& e) {
    log_warning("checkpoint ", tag(), " was not saved: ", e.what());
  }
}

void SaveJob::begin() const {
  if (target_.rank == 0) target_.folder.begin(tag());
}

void SaveJob::write(const std::function<void(const Sink&)>& produce) {
  const std::string file = ckpt::rank_file_name(target_.rank, target_.world);
  ckpt::SafetensorsWriter writer(target_.folder.unfinished(tag()) / file, target_.tensors,
                                 {{"format", "pt"}, {"ballast", "shard"}}, {target_.rank});
  tiers::BounceBuffer bounce(target_.device, target_.pin_memory);
  produce([&](const at::Tensor& tensor) {
    bounce.read(tensor, [&writer](const at::Tensor& part) {
      writer.append({static_cast<const std::byte*>(part.const_data_ptr()), part.nbytes()});
    });
  });
  const auto digest = writer.finish();
  ckpt::Part part{{file, digest.bytes, digest.checksum}, {}};
  for (std::size_t i = 0; i < target_.tensors.size(); ++i) part.tensors[target_.tensors[i].name] = digest.tensors[i];
  target_.folder.leave_part(tag(), target_.rank, target_.world, part);
}

void SaveJob::commit() {
  if (target_.rank != 0) return;
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + target_.timeout;
  std::optional<Clock::time_point> last;  // of an engine that ends
  auto pause = std::chrono::milliseconds(1);
  std::vector<ckpt::Part> parts;
  while (static_cast<int>(parts.size()) < target_.world) {
    const int rank = static_cast<int>(parts.size());
    if (auto part = target_.folder.find_part(tag(), rank, target_.world)) {
      parts.push_back(std::move(*part));
      continue;
    }
    if (abandoned_.load(std::memory_order_relaxed)) throw GivenUp();
    const auto now = Clock::now();
    if (!last && ending_.load(std::memory_order_relaxed)) last = now + kLastWait;
    if (last && now > *last)
      throw IoError("engine.save_checkpoint", "the engine ended before a rank's file was there (rank ", rank, ", tag ",
                    tag(), ", ", target_.folder.path().string(), "; synchronize() waits for it)");
    if (now > deadline)
      throw IoError("engine.save_checkpoint", "a rank's file didn't come (rank ", rank, ", tag ", tag(), ", ",
                    target_.folder.path().string(), ", waited ", target_.timeout.count() / 1000.0,
                    " s; all ranks must see one folder, see comm_timeout_seconds)");
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::milliseconds(100));
  }
  target_.folder.commit(target_.manifest, parts, target_.keep_last);
}

void SaveJob::clean_up() const noexcept {
  if (target_.rank == 0) target_.folder.abandon(tag());
}

void SaveJob::start(std::vector<at::Tensor> snapshot) {
  thread_ = std::thread([this, snapshot = std::move(snapshot)] {
    State end = State::kDone;
    try {
      write([&snapshot](const Sink& sink) { std::for_each(snapshot.begin(), snapshot.end(), sink); });
      commit();
    } catch (const GivenUp&) {
      end = State::kFailed;
    } catch (...) {
      error_ = std::current_exception();
      end = State::kFailed;
    }
    state_.store(end, std::memory_order_release);
  });
}

void SaveJob::settle() {
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

std::vector<at::Tensor> SnapshotMemory::take(const std::vector<ckpt::TensorSpec>& tensors, bool pin, c10::Device device,
                                             const std::shared_ptr<Ledger>& ledger) {
  constexpr std::int64_t kAlign = 64;  // bytes, of each tensor
  std::int64_t bytes = 0;
  std::vector<std::int64_t> begins, sizes;
  for (const ckpt::TensorSpec& tensor : tensors) {
    std::int64_t elements = 1;
    for (const std::int64_t size : tensor.shape) elements *= size;
    begins.push_back(bytes);
    sizes.push_back(elements * static_cast<std::int64_t>(c10::elementSize(tensor.dtype)));
    bytes = round_up(bytes + sizes.back(), kAlign);
  }
  if (!memory_.defined() || bytes > memory_.numel()) {
    memory_.reset();
    entry_ = {};
    tiers::HostArena arena(tiers::HostArena::bytes_of(bytes, at::kByte), pin, device);
    memory_ = arena.allocate(bytes, at::kByte);
    entry_ = ledger->track(MemoryKind::kStaging, Tier::kHost, bytes);
  }
  std::vector<at::Tensor> made;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    made.push_back(memory_.narrow(0, begins[i], sizes[i]).view(tensors[i].dtype).view(tensors[i].shape));
  return made;
}

}  // namespace ballast
