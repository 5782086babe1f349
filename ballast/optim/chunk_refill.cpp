#include "ballast/optim/chunk_refill.h"

#include <algorithm>
#include <vector>

namespace ballast {

using Access = StateChunks::Access;

ChunkRefill::~ChunkRefill() {
  try {
    lane_.submit([ends_there = std::shared_ptr<StateChunks>(std::move(chunks_))] {});
  } catch (const std::exception&) {  // an error has ended the lane, and was thrown when it came
  }
}

// The first error makes the rest of the jobs nothing.
tiers::HostLane::Ticket ChunkRefill::submit(const std::function<void()>& job) {
  return lane_.submit([this, job] {
    if (error_) return;
    try {
      job();
    } catch (...) {
      error_ = std::current_exception();
    }
  });
}

void ChunkRefill::wait(tiers::HostLane::Ticket ticket) {
  lane_.wait(ticket, "room for states");
  if (error_) std::rethrow_exception(error_);
}

// Behind each opening the lane drives the writes that are under way, which would stop at the disk's queue otherwise.
void ChunkRefill::run(const std::function<void(int chunk, float* floats)>& begin,
                      const std::function<void()>& complete) {
  std::vector<float*> open(static_cast<std::size_t>(together_));
  try {
    for (int first = 0; first < count_; first += together_) {
      const int end = std::min(first + together_, count_);
      const auto opened = submit([&, first, end] {
        for (int chunk = first; chunk < end; ++chunk)
          open[static_cast<std::size_t>(chunk - first)] = chunks_->open(chunk, Access::kReplace);
      });
      submit([this] { chunks_->finish(); });
      wait(opened);
      for (int chunk = first; chunk < end; ++chunk) begin(chunk, open[static_cast<std::size_t>(chunk - first)]);
      complete();
      submit([this, first, end] {
        for (int chunk = first; chunk < end; ++chunk) chunks_->close(chunk, Access::kReplace);
      });
    }
    wait(submit([this] { chunks_->finish(); }));
  } catch (...) {
    lane_.drain();  // a job uses `open`
    throw;
  }
}

}  // namespace ballast
