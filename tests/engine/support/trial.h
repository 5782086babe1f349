#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ballast/engine/engine.h"
#include "tests/engine/support/board.h"
#include "tests/engine/support/cell.h"
#include "tests/engine/support/lin.h"
#include "tests/engine/support/save_folder.h"

namespace ballast::testing {

/// One engine under test on one rank, with what the cases say again and again. Expectations never return early, so that
/// a failing rank doesn't leave its peers waiting.
class Session {
 public:
  Session(std::shared_ptr<torch::nn::Module> model, const nlohmann::json& settings, const World& world, Board& board);

  Engine& engine() { return *engine_; }
  Board& board() { return board_; }
  /// All ranks are here. Collective.
  void meet_others() { engine_->full_parameter(model_->named_parameters().begin()->key()); }
  Lin& model() { return *lin_; }  // of sessions on a Lin
  at::Tensor loss(const Pull& pull) { return loss_of(*lin_, pull); }

  void backward(const Pull& pull, const BackwardOptions& options = {}) { engine_->backward(loss(pull), options); }
  /// Ends or counts; the report must be equal on all ranks.
  StepReport step();
  /// One backward and one step() call.
  StepReport micro_batch(const Pull& pull, const BackwardOptions& options = {});
  /// A whole window. Managed: every micro-batch is followed by step(), and all but the last must be mid-window.
  StepReport window(const std::vector<Pull>& pulls, const BackwardOptions& options = {});

  /// fp32 masters of all trainable parameters, by name.
  std::map<std::string, at::Tensor> masters();
  void expect_value(const std::string& name, double value, double tolerance = 1e-6);
  void expect_grad(const std::string& name, double value, double tolerance = 1e-6);
  void expect_state(const std::string& name, const std::string& key, double value, double tolerance = 1e-6);
  /// Posts masters and compute copies of all parameters for comparison between ranks. Collective.
  void post_parameters();

 private:
  std::shared_ptr<torch::nn::Module> model_;
  Lin* lin_;
  bool managed_;
  Board& board_;
  std::unique_ptr<Engine> engine_;
  int steps_ = 0;
};

/// One rank's view of a run of a case in one cell. At its end the driver compares parameters and reports of all
/// sessions between ranks.
class Trial {
 public:
  Trial(const World& world, const Cell& cell, Board& board, const SaveFolder& folder);

  const Cell& cell() const { return cell_; }
  const World& world() const { return world_; }
  int rank() const { return world_.rank(); }
  /// One for all ranks.
  const SaveFolder& folder() const { return folder_; }
  /// Another value on every rank whose mean over the ranks is `mean`: mean - (W-1), ..., mean + (W-1).
  double shared(double mean) const { return mean + 2 * world_.rank() - (world_.size() - 1); }

  Session& start(std::shared_ptr<torch::nn::Module> model, const nlohmann::json& settings);
  /// The cell's settings() with a window of `accumulation_steps`.
  Session& start(std::shared_ptr<torch::nn::Module> model, int accumulation_steps = 1,
                 const nlohmann::json& changes = nlohmann::json::object());
  void finish();
  /// Sessions that a test has ended itself.
  void forget_sessions() { sessions_.clear(); }

 private:
  World world_;
  Cell cell_;
  Board& board_;
  const SaveFolder& folder_;
  ::testing::ScopedTrace trace_;  // traces are per thread: this names the rank in what it reports
  std::list<Session> sessions_;   // newest first
};

/// Runs `body` on `ranks` threads, then compares what they posted.
void run_trial(int ranks, const Cell& cell, const std::function<void(Trial&)>& body);

void expect_all(const at::Tensor& tensor, double value, double tolerance, const std::string& what);

}  // namespace ballast::testing
