#include "tests/engine/support/trial.h"

#include <torch/nn/module.h>

#include "ballast/comm/testing.h"
#include "tests/engine/support/swap_folder.h"

namespace ballast::testing {

void expect_all(const at::Tensor& tensor, double value, double tolerance, const std::string& what) {
  EXPECT_TRUE(tensor.defined()) << what << ": no tensor, expected " << value;
  if (!tensor.defined() || tensor.numel() == 0) return;
  const at::Tensor values = tensor.detach().cpu().to(at::kDouble);
  const double worst = (values - value).abs().max().item<double>();
  EXPECT_TRUE(worst <= tolerance) << what << ": expected " << value << " in all elements, got "
                                  << values.flatten()[0].item<double>() << " in the first, off by " << worst
                                  << " in the worst";
}

Session::Session(std::shared_ptr<torch::nn::Module> model, const nlohmann::json& settings, const World& world,
                 Board& board)
    : model_(std::move(model)), lin_(dynamic_cast<Lin*>(model_.get())), board_(board) {
  const Config config = Config::from_json(settings);
  managed_ = config.managed_gradient_accumulation;
  engine_ = std::make_unique<Engine>(model_, config, world);
}

StepReport Session::step() {
  const StepReport report = engine_->step();
  board_.post(engine_->world().rank(), "report " + std::to_string(++steps_), report);
  return report;
}

StepReport Session::micro_batch(const Pull& pull, const BackwardOptions& options) {
  backward(pull, options);
  return step();
}

StepReport Session::window(const std::vector<Pull>& pulls, const BackwardOptions& options) {
  StepReport report;
  for (std::size_t i = 0; i < pulls.size(); ++i) {
    backward(pulls[i], options);
    const bool last = i + 1 == pulls.size();
    if (!managed_ && !last) continue;
    EXPECT_EQ(engine_->is_gradient_accumulation_boundary(), last || !managed_) << "micro-batch " << i;
    report = step();
    if (!last) {
      EXPECT_EQ(report.reason, StepReason::kMidWindow) << "micro-batch " << i;
    }
  }
  return report;
}

std::map<std::string, at::Tensor> Session::masters() {
  std::map<std::string, at::Tensor> all;
  for (const auto& item : model_->named_parameters())
    if (item.value().requires_grad()) all[item.key()] = engine_->full_parameter(item.key()).clone();
  return all;
}

void Session::expect_value(const std::string& name, double value, double tolerance) {
  expect_all(engine_->full_parameter(name), value, tolerance, "parameter " + name);
}

void Session::expect_grad(const std::string& name, double value, double tolerance) {
  expect_all(engine_->full_grad(name), value, tolerance, "gradient of " + name);
}

void Session::expect_state(const std::string& name, const std::string& key, double value, double tolerance) {
  expect_all(engine_->full_optimizer_state(name, key), value, tolerance, key + " of " + name);
}

void Session::post_parameters() {
  const int rank = engine_->world().rank();
  for (const auto& item : model_->named_parameters()) {
    board_.post(rank, "master of " + item.key(), engine_->full_parameter(item.key()));
    board_.post(rank, "parameter " + item.key(), item.value().detach().clone());  // clone: an operator, so it faults in
  }
}

Trial::Trial(const World& world, const Cell& cell, Board& board, const SaveFolder& folder)
    : world_(world),
      cell_(cell),
      board_(board),
      folder_(folder),
      trace_(__FILE__, __LINE__, name_of(cell) + ", rank " + std::to_string(world.rank())) {}

Session& Trial::start(std::shared_ptr<torch::nn::Module> model, const nlohmann::json& settings) {
  return sessions_.emplace_front(std::move(model), settings, world_, board_);
}

Session& Trial::start(std::shared_ptr<torch::nn::Module> model, int accumulation_steps, const nlohmann::json& changes) {
  return start(std::move(model), settings(cell_, accumulation_steps, changes));
}

void Trial::finish() {
  for (Session& session : sessions_) session.post_parameters();
  sessions_.clear();
}

void run_trial(int ranks, const Cell& cell, const std::function<void(Trial&)>& body) {
  Board board(ranks);
  const SaveFolder folder(ranks);
  run_ranks(
      ranks,
      [&](const World& world) {
        Trial trial(world, cell, board, folder);
        body(trial);
        trial.finish();
        board.close(world);
      },
      thread_options());
  board.expect_equal();
  if (cell.on_disk()) expect_nothing_swapped();
}

}  // namespace ballast::testing
