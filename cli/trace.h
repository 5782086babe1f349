#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace ballast::cli {

/// Steps of a run, from 1, both included.
struct StepRange {
  std::int64_t first = 0, last = 0;
};

/// What `ballast train --trace` was asked for.
struct TraceOptions {
  std::string file;                // empty: no trace
  std::optional<StepRange> steps;  // else a few after the warm-up
};

/// "5:10". UseError for anything else.
StepRange parse_steps(const std::string& text);

/// Where this rank's trace goes: "out.rank3.json" for "out.json" where there are several ranks.
std::filesystem::path trace_file(const std::string& file, int rank, int ranks);

/// Records some steps of a run for one rank's trace (ballast/base/trace.h).
class RunTrace {
 public:
  /// run_steps: of the whole run. Creates the file, so that what is wrong with it is said before anything is computed.
  /// Throws UseError (steps that the run doesn't have), IoError.
  RunTrace(const TraceOptions& options, std::int64_t run_steps, int rank, int ranks);

  /// Before step number `step`.
  void begin(std::int64_t step);
  /// Behind it. ends_run: none follows. Writes the file as soon as all is there: a run that is killed later keeps it.
  void end(std::int64_t step, bool ends_run);
  /// Once it is written; else empty.
  const std::filesystem::path& written() const noexcept { return written_; }

 private:
  std::filesystem::path file_, written_;
  StepRange steps_;
  int rank_;
};

}  // namespace ballast::cli
