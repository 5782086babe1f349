#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "ballast/comm/agreement.h"
#include "ballast/config/config.h"
#include "ballast/data/sampler.h"
#include "ballast/data/windows.h"
#include "ballast/engine/engine.h"
#include "ballast/models/gpt.h"
#include "ballast/monitor/breakdown.h"
#include "cli/evaluation.h"
#include "cli/resume.h"
#include "cli/run_file.h"
#include "cli/status.h"
#include "cli/weights.h"

namespace ballast::cli {

/// Backwards of the caller-owned window number `step`: between the section's two bounds, a function of seed and step
/// alone, so that all ranks agree without a word.
std::int64_t window_length(const TrainSection& train, std::int64_t step);

/// Model, data and engine of one run on this rank, and what it does with them. Every call is collective.
class Trainer {
 public:
  /// windows: cut as run.model.context says. init: what the weights start from, in place of the seed; null: nothing.
  Trainer(const RunFile& run, const World& world, std::shared_ptr<const data::Windows> windows,
          WeightSource* init = nullptr);

  /// Takes up that checkpoint. Returns the status's sums as they were saved, nothing where there is no point on any
  /// rank. Throws what load_checkpoint throws; ConfigError or UseError where the checkpoint is of another model, seed
  /// or text, or beyond the run's last step.
  std::optional<nlohmann::json> resume(const std::optional<ResumePoint>& point);
  /// As the run's section says. sums: rank 0's counts.
  void save(const nlohmann::json& sums);

  /// Runs one window, and evaluates behind it where that is due.
  StepResult step();
  /// Evaluates the held-out part.
  Evaluation evaluate();
  /// run.sample.count tokens behind run.sample.prompt (as bytes, which every vocabulary of text has).
  std::vector<std::int64_t> sample();

  std::int64_t steps() const { return step_; }                               // so far
  std::string tag() const { return "global_step" + std::to_string(step_); }  // of a checkpoint of now
  bool finished() const { return step_ >= run_.train.steps; }
  std::int64_t parameters() const { return parameters_; }
  double epoch() const { return sampler_.epoch(); }
  const Engine& engine() const { return engine_; }
  /// Waits for what is under way. Throws what became of it.
  void settle() { engine_.synchronize(); }
  const BatchShape& batch() const { return shape_; }
  /// Wall clock by phase so far; empty unless engine.wall_clock_breakdown.
  std::string times() const { return breakdown_ ? breakdown_->summary() : ""; }

 private:
  monitor::Breakdown* breakdown() { return breakdown_ ? &*breakdown_ : nullptr; }
  void take_up(const nlohmann::json& train, const std::string& where);
  StepReport run_window(std::int64_t backwards, StepResult& result);
  at::Tensor forward(StepResult& result);

  const RunFile run_;
  const World world_;
  std::shared_ptr<const data::Windows> windows_;
  const BatchShape shape_;
  models::Gpt model_;
  const std::int64_t parameters_;
  Engine engine_;
  data::Sampler sampler_;
  Agreement agreement_;
  std::optional<monitor::Breakdown> breakdown_;
  std::int64_t step_ = 0;
};

}  // namespace ballast::cli
