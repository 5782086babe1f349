#include "ballast/params/write_watch.h"

namespace ballast {

WriteWatch::WriteWatch(std::vector<std::vector<at::Tensor>> slots)
    : slots_(std::move(slots)), versions_(slots_.size()), marked_(slots_.size()) {
  accept_all();
}

// Tensors that share memory may or may not share a counter: the sum changes with each of them.
std::uint32_t WriteWatch::version(std::size_t slot) const {
  std::uint32_t sum = 0;
  for (const at::Tensor& tensor : slots_[slot]) sum += static_cast<std::uint32_t>(tensor._version());
  return sum;
}

void WriteWatch::accept(std::size_t slot) {
  versions_[slot] = version(slot);
  marked_[slot] = false;
}

void WriteWatch::accept_all() {
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) accept(slot);
}

void WriteWatch::mark(std::size_t slot) {
  if (slot < marked_.size()) marked_[slot] = true;  // else nothing is watched
}

std::optional<std::size_t> WriteWatch::find() const {
  for (std::size_t slot = 0; slot < slots_.size(); ++slot)
    if (marked_[slot] || version(slot) != versions_[slot]) return slot;
  return std::nullopt;
}

UseError lost_write(const std::string& parameter, int rank) {
  return UseError(
      "params.write", "a parameter was written in place outside engine.gathered(params, writer) (parameter ", parameter,
      ", rank ", rank,
      "; its next values come from the engine's own copy, so the write would be lost: write it while such a "
      "guard that names it lives, and let the guard end before other calls)");
}

}  // namespace ballast
