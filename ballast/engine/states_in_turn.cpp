#include "ballast/engine/states_in_turn.h"

#include "ballast/tiers/host_arena.h"

namespace ballast {

void StatesInTurn::add(int unit, Range flat) {
  const std::int64_t kept = optimizer_.kept_range(unit).begin;
  parts_.push_back({unit, {flat.begin - kept, flat.end - kept}});
}

std::vector<StateRun> StatesInTurn::take() {
  if (begun_ == 0) begin();
  std::vector<StateRun> runs = next_.get();
  const std::int64_t kept = optimizer_.kept_range(parts_[begun_ - 1].unit).begin;
  for (StateRun& run : runs) run.range = {run.range.begin + kept, run.range.end + kept};
  if (begun_ < parts_.size()) begin();
  return runs;
}

void StatesInTurn::begin() {
  const StateChunk& part = parts_[begun_];
  at::Tensor& memory = memory_[begun_++ % memory_.size()];
  const std::int64_t floats = part.range.size() * (1 + static_cast<std::int64_t>(optimizer_.keys().size()));
  if (copies_ && (!memory.defined() || memory.numel() < floats)) {
    memory.reset();
    memory =
        tiers::HostArena(tiers::HostArena::bytes_of(floats, at::kFloat), false, c10::kCPU).allocate(floats, at::kFloat);
  }
  next_ = optimizer_.read_all(part.unit, part.range, memory);
}

}  // namespace ballast
