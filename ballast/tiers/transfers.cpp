#include "ballast/tiers/transfers.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "ballast/base/error.h"
#include "ballast/base/math.h"

namespace ballast::tiers {
namespace {

constexpr int kPatience = 1000;  // tries of one request that move nothing

const char* remedy_of(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "free space there or choose another nvme_path";
    case EIO:
      return "look for disk errors in the kernel's log, or choose another nvme_path";
    default:
      return "mend its cause or choose another nvme_path";
  }
}

constexpr int kDeepest = 4096;  // requests in one queue; what systems take

bool passes(int error) { return error == EINTR || error == EAGAIN || error == ECANCELED; }

}  // namespace

Transfers::Transfers(DiskFile& file, const DiskOptions& options)
    : file_(file), block_(round_up(options.block_size, kDiskAlign)), depth_(options.queue_depth) {
  DiskOptions wide = options;
  wide.queue_depth = std::max(depth_, std::min(depth_ * kChunksAtOnce, kDeepest));
  queue_ = make_disk_queue(file, wide);
  pieces_.resize(static_cast<std::size_t>(queue_->depth()));
  for (std::size_t slot = pieces_.size(); slot > 0; --slot) free_.push_back(slot - 1);
}

void Transfers::start(int chunk, DiskOp op, std::int64_t offset, std::span<std::byte> data) {
  const auto bytes = static_cast<std::int64_t>(data.size());
  if (bytes == 0) return;
  chunks_[chunk] = {.op = op, .offset = offset, .data = data, .begun = 0, .left = bytes, .in_flight = 0};
  waiting_.push_back(chunk);
  pump();
}

void Transfers::wait(int chunk) {
  while (chunks_.contains(chunk)) {
    fill();
    if (!reap(true)) {
      drain();
      throw IoError("tiers.wait", "the system no longer reports what has finished (", file_.path().string(), ", chunk ",
                    chunk, ", rank ", file_.rank(), "; start again)");
    }
  }
  pump();
}

void Transfers::pump() {
  while (reap(false)) {
  }
  fill();
}

void Transfers::drain() noexcept {
  while (queue_->in_flight() > 0 && queue_->reap(true)) {
  }
  chunks_.clear();
  waiting_.clear();
  free_.clear();
  for (std::size_t slot = pieces_.size(); slot > 0; --slot) free_.push_back(slot - 1);
}

/// Cuts waiting chunks into pieces for as long as the queue has room, the oldest chunk first.
void Transfers::fill() {
  for (auto name = waiting_.begin(); name != waiting_.end() && !free_.empty();) {
    Chunk& chunk = chunks_.at(*name);
    const auto bytes = static_cast<std::int64_t>(chunk.data.size());
    while (!free_.empty() && chunk.begun < bytes && chunk.in_flight < depth_) {
      const std::size_t slot = free_.back();
      free_.pop_back();
      pieces_[slot] = {.chunk = *name, .at = chunk.begun, .bytes = std::min(block_, bytes - chunk.begun)};
      chunk.begun += pieces_[slot].bytes;
      ++chunk.in_flight;
      batch_.push_back(request(slot));
    }
    name = chunk.begun == bytes ? waiting_.erase(name) : name + 1;
  }
  submit();
}

DiskRequest Transfers::request(std::size_t slot) {
  Piece& piece = pieces_[slot];
  const Chunk& chunk = chunks_.at(piece.chunk);
  piece.direct = file_.direct();
  return {.op = chunk.op,
          .offset = chunk.offset + piece.at,
          .data = chunk.data.data() + piece.at,
          .bytes = piece.bytes,
          .tag = slot};
}

void Transfers::submit() {
  if (batch_.empty()) return;
  const auto requests = std::exchange(batch_, {});
  try {
    queue_->submit(requests);
  } catch (...) {
    drain();
    throw;
  }
}

bool Transfers::reap(bool wait) {
  const auto completion = queue_->reap(wait);
  if (completion) settle(*completion);
  return completion.has_value();
}

void Transfers::settle(const DiskCompletion& completion) {
  const auto slot = static_cast<std::size_t>(completion.tag);
  Piece& piece = pieces_[slot];
  Chunk& chunk = chunks_.at(piece.chunk);
  if (completion.result < 0) {
    const int error = static_cast<int>(-completion.result);
    if (error == EINVAL && piece.direct) {
      file_.drop_direct();
      return again(slot);
    }
    if (passes(error) && ++piece.fruitless <= kPatience) return again(slot);
    fail(piece, errno_text(error), remedy_of(error));
  }
  // What stops between two sectors is resumed at the sector's start, where O_DIRECT lets it.
  std::int64_t moved = std::min(completion.result, piece.bytes);
  if (piece.direct && moved < piece.bytes) moved -= moved % kDiskAlign;
  piece.at += moved;
  piece.bytes -= moved;
  chunk.left -= moved;
  if (piece.bytes == 0) return free(slot);
  if (moved > 0) return again(slot);
  if (chunk.op == DiskOp::kRead && file_.length_now() < chunk.offset + piece.at + piece.bytes)
    fail(piece, "the file ends too early", "something else has cut it: nothing but this run may write there");
  if (++piece.fruitless > kPatience) fail(piece, "the disk moves nothing", "choose another nvme_path");
  again(slot);
}

void Transfers::again(std::size_t slot) {
  batch_.push_back(request(slot));
  submit();
}

void Transfers::free(std::size_t slot) {
  free_.push_back(slot);
  const auto found = chunks_.find(pieces_[slot].chunk);
  --found->second.in_flight;
  if (found->second.left > 0) return;
  if (trace::on())
    found->second.started.end(trace::Lane::kDisk, found->second.op == DiskOp::kRead ? "read chunk" : "write chunk",
                              std::to_string(found->first) + " of " + file_.path().filename().string());
  chunks_.erase(found);
}

void Transfers::fail(const Piece& piece, const std::string& what, const char* remedy) {
  const Piece at = piece;  // drain() forgets them
  const Chunk chunk = chunks_.at(at.chunk);
  drain();
  const auto want = static_cast<std::int64_t>(chunk.data.size());
  throw IoError(chunk.op == DiskOp::kRead ? "tiers.read" : "tiers.write", what, " (", file_.path().string(), ", chunk ",
                at.chunk, " at byte ", chunk.offset, ", failed at byte ", chunk.offset + at.at, "; got ",
                want - chunk.left, ", want ", want, " bytes; rank ", file_.rank(), "; ", remedy, ")");
}

}  // namespace ballast::tiers
