#include "ballast/engine/save_job.h"

#include <algorithm>

#include "ballast/base/error.h"
#include "ballast/tiers/host_arena.h"

namespace ballast {
namespace {

struct GivenUp {};  // another rank has the error

}  // namespace

SaveJob::~SaveJob() {
  abandon();
  if (thread_.joinable()) thread_.join();
}

void SaveJob::begin() const {
  if (target_.rank == 0) target_.folder.begin(tag());
}

void SaveJob::write(const std::function<void(const Sink&)>& produce) {
  const std::string file = ckpt::rank_file_name(target_.rank, target_.world);
  ckpt::SafetensorsWriter writer(target_.folder.unfinished(tag()) / file, target_.tensors,
                                 {{"format", "pt"}, {"ballast", "shard"}}, {target_.rank});
  produce([&writer](std::span<const std::byte> data) { writer.append(data); });
  const auto digest = writer.finish();
  ckpt::Part part{{file, digest.bytes, digest.checksum}, {}};
  for (std::size_t i = 0; i < target_.tensors.size(); ++i) part.tensors[target_.tensors[i].name] = digest.tensors[i];
  target_.folder.leave_part(tag(), target_.rank, target_.world, part);
}

void SaveJob::commit() {
  if (target_.rank != 0) return;
  const auto deadline = std::chrono::steady_clock::now() + target_.timeout;
  auto pause = std::chrono::milliseconds(1);
  std::vector<ckpt::Part> parts;
  while (static_cast<int>(parts.size()) < target_.world) {
    const int rank = static_cast<int>(parts.size());
    if (auto part = target_.folder.find_part(tag(), rank, target_.world)) {
      parts.push_back(std::move(*part));
      continue;
    }
    if (abandoned_.load(std::memory_order_relaxed)) throw GivenUp();
    if (std::chrono::steady_clock::now() > deadline)
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

void SaveJob::start(std::span<const std::byte> data) {
  thread_ = std::thread([this, data] {
    State end = State::kDone;
    try {
      write([data](const Sink& sink) { sink(data); });
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
  if (error_) std::rethrow_exception(error_);
}

std::span<std::byte> SnapshotBuffer::take(std::int64_t bytes, const std::shared_ptr<Ledger>& ledger) {
  if (!memory_.defined() || bytes > memory_.numel()) {
    memory_.reset();
    entry_ = {};
    tiers::HostArena arena(tiers::HostArena::bytes_of(bytes, at::kByte), false, c10::kCPU);
    memory_ = arena.allocate(bytes, at::kByte);
    entry_ = ledger->track(MemoryKind::kStaging, Tier::kHost, bytes);
  }
  return {static_cast<std::byte*>(memory_.mutable_data_ptr()), static_cast<std::size_t>(bytes)};
}

}  // namespace ballast
