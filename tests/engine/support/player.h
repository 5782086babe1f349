#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/engine/support/trial.h"
#include "tests/engine/support/window_model.h"

namespace ballast::testing {

/// Plays one random schedule of calls on an engine and on the plain model of its meaning, and compares the two. Every
/// rank draws the same numbers, for all ranks; what one rank does may differ from the others' wherever the engine
/// allows it. Gradients are integers, so that what has landed and what is pending can be compared exactly.
class Player {
 public:
  Player(std::uint64_t seed, const World& world, Board& board);
  void play();
  std::string description() const;

 private:
  struct Term {
    std::string name;
    double coefficient;
    bool infinite;  // in its first element
  };
  /// A forward whose graph is alive: per rank its terms and how often it may still run backwards.
  struct Graph {
    std::vector<std::vector<Term>> terms;
    std::vector<int> left;
    at::Tensor loss;  // this rank's
  };
  /// How this window's backwards are scaled; one kind a window.
  enum class Scaling { kMean, kSum, kWeights };

  int draw(int n) { return static_cast<int>(random_() % static_cast<std::uint64_t>(n)); }  // 0 ... n-1
  bool chance(int percent) { return draw(100) < percent; }

  void forward();
  void backward();
  void step();
  void zero_grad();
  void evaluate();
  void read_gradient();
  void open_or_close_scope();
  void set_boundary();

  std::vector<Term> draw_terms();
  at::Tensor loss_of(const std::vector<Term>& terms);
  WindowModel::Tensors gradients_of(const std::vector<Term>& terms, double factor) const;
  void compare_gradient(const std::string& name);
  void compare_counters();
  void compare_values();

  std::mt19937_64 random_;
  std::uint64_t seed_;
  World world_;
  Cell cell_;
  int accumulation_steps_ = 1;
  nlohmann::json settings_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<WindowModel> expected_;
  std::list<Graph> graphs_;
  std::optional<ScopeGuard> scope_;
  Scaling scaling_ = Scaling::kMean;
};

}  // namespace ballast::testing
