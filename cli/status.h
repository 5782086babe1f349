#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "ballast/base/ledger.h"
#include "ballast/grads/step_report.h"

namespace ballast::cli {

/// What one window of a run came to. Equal on all ranks but for the times and the memory.
struct StepResult {
  std::int64_t step = 0;  // from 1
  StepReport report;
  double nats = 0;            // mean loss over the window's tokens of all ranks
  std::int64_t tokens = 0;    // of the window, all ranks
  bool stop = false;          // some rank was interrupted
  double seconds = 0;         // this rank's wall clock, evaluation left out
  std::vector<double> times;  // by phase, where a breakdown was asked for
  std::optional<double> held_out_nats;
};

/// Phases of a breakdown, in the order of StepResult::times.
const std::vector<std::string>& phase_names();

/// Sums over a run so far, for the lines that a user sees and the rows of the metrics.
class Status {
 public:
  /// unit: "byte" or "token", what a token of the text is. scaled: the loss is, so its scale is shown.
  Status(std::int64_t steps, std::string unit, bool scaled = false)
      : steps_(steps), unit_(std::move(unit)), scaled_(scaled) {}

  void add(const StepResult& result, double epoch, const Ledger& memory);

  /// The sums so far, and a run that goes on with them behind step `step`.
  nlohmann::json sums() const;
  void go_on(std::int64_t step, const nlohmann::json& sums);

  double fraction() const { return static_cast<double>(last_.step) / static_cast<double>(steps_); }
  std::int64_t tokens() const { return tokens_; }
  double seconds() const { return seconds_; }
  std::optional<double> held_out_nats() const { return held_out_nats_; }
  const StepResult& last() const { return last_; }

  /// One line on the last window; its speed is that since the line that last started an interval.
  std::string line(bool starts_interval);
  /// "2.96 bits a byte".
  std::string bits(double nats) const;
  /// "1170 steps, 2 not applied (loss scale 16384), 6.00 M bytes in 3 min 58 s (25.2 k bytes/s)".
  std::string summary() const;

  static std::vector<std::string> columns(bool with_times);
  std::vector<std::optional<double>> row(bool with_times) const;

 private:
  std::int64_t steps_;
  std::string unit_;
  bool scaled_;
  StepResult last_;
  std::int64_t first_step_ = 0;  // behind which this process began
  double first_seconds_ = 0;
  std::int64_t tokens_ = 0, interval_tokens_ = 0, not_applied_ = 0;
  double seconds_ = 0, interval_seconds_ = 0, epoch_ = 0;
  std::array<Ledger::Cell, 3> memory_{};  // by tier
  std::optional<double> held_out_nats_;
};

/// "512", "372 k", "6.00 M": three significant digits, powers of 1000.
std::string format_count(double count);

}  // namespace ballast::cli
