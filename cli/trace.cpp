#include "cli/trace.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>

#include "ballast/base/error.h"
#include "ballast/base/trace.h"

namespace ballast::cli {
namespace {

// Behind the steps in which stage 3 learns the order of units and allocators fill their caches. A run that is too short
// for that is recorded from where six steps are left.
StepRange default_steps(std::int64_t run_steps) {
  constexpr StepRange kUsual{5, 10};
  if (run_steps >= kUsual.last) return kUsual;
  return {std::max<std::int64_t>(1, run_steps - (kUsual.last - kUsual.first)), run_steps};
}

}  // namespace

StepRange parse_steps(const std::string& text) {
  StepRange steps;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, steps.first);
  const bool colon = first.ec == std::errc() && first.ptr != end && *first.ptr == ':';
  const auto last = colon ? std::from_chars(first.ptr + 1, end, steps.last) : first;
  if (!colon || last.ec != std::errc() || last.ptr != end || steps.first < 1 || steps.last < steps.first)
    throw UseError("cli.parse", "not a range of steps (--trace-steps ", text, "; want FIRST:LAST, as 5:10)");
  return steps;
}

std::filesystem::path trace_file(const std::string& file, int rank, int ranks) {
  std::filesystem::path path = file;
  if (ranks > 1) {
    const std::string extension = path.extension().string();
    path.replace_extension(".rank" + std::to_string(rank) + extension);
  }
  return path;
}

RunTrace::RunTrace(const TraceOptions& options, std::int64_t run_steps, int rank, int ranks)
    : steps_(options.steps.value_or(default_steps(run_steps))), rank_(rank) {
  if (options.file.empty()) return;
  if (steps_.first > run_steps)
    throw UseError("cli.train", "the run ends before the steps to trace (--trace-steps ", steps_.first, ":",
                   steps_.last, ", train.steps ", run_steps, ")");
  file_ = trace_file(options.file, rank, ranks);
  if (!std::ofstream(file_))
    throw IoError("cli.train", "can't write the trace (--trace ", file_.string(), ": ", std::strerror(errno), ")");
}

void RunTrace::begin(std::int64_t step) {
  if (!file_.empty() && step == steps_.first) trace::start();
}

void RunTrace::end(std::int64_t step, bool ends_run) {
  if (file_.empty() || !written_.empty() || step < steps_.first) return;
  if (step < steps_.last && !ends_run) return;
  trace::write(file_, rank_);
  written_ = file_;
}

}  // namespace ballast::cli
