#include "tests/engine/support/player.h"

#include <ATen/ATen.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <sstream>
#include <thread>

#include "ballast/base/error.h"
#include "ballast/tiers/lane_hook.h"

namespace ballast::testing {

namespace {

constexpr int kCalls = 30;

// Units (root), a, b, c and the leaf moe; "c.tied" is "a.p" too.
const std::vector<Named> kParameters{{"r", {}},         {"a.p", {5}},       {"b.p", {33}},     {"b.q", {2, 3}},
                                     {"moe.e0.p", {7}}, {"moe.e1.p", {65}}, {"moe.e2.p", {1}}, {"c.p", {3, 1, 2}}};
constexpr const char* kTied = "c.tied";

// c, 2c, 3c, c, ...: so that no two neighbours are equal and a shard in the wrong place shows.
at::Tensor pattern(const at::Tensor& like, double coefficient, bool infinite) {
  at::Tensor flat = (at::arange(like.numel(), at::kDouble).remainder(3) + 1) * coefficient;
  if (infinite && flat.numel() > 0) flat[0] = std::numeric_limits<double>::infinity();
  return flat.reshape(like.sizes());
}

}  // namespace

Player::Player(std::uint64_t seed, const World& world, Board& board) : random_(seed), seed_(seed), world_(world) {
  const int stage = draw(4);
  Placement placement = kEveryPlacement[static_cast<std::size_t>(draw(static_cast<int>(kEveryPlacement.size())))];
  if (placement == Placement::kAllHost && stage != 3) placement = Placement::kHost;
  cell_ = {stage, placement, static_cast<DType>(draw(3)), chance(50)};
  accumulation_steps_ = 1 + draw(3);
  const double clip = chance(30) ? 2.0 : 0.0;
  constexpr std::int64_t kBuckets[] = {1, 64, 500'000'000};
  nlohmann::json zero = {{"overlap_comm", chance(50)},
                         {"reduce_bucket_size", kBuckets[draw(3)]},
                         {"allgather_bucket_size", kBuckets[draw(3)]},
                         {"stage3_max_live_parameters", chance(50) ? 0 : 1'000'000},
                         {"stage3_prefetch_bucket_size", chance(50) ? 0 : 1'000'000},
                         {"stage3_param_persistence_threshold", chance(30) ? 40 : 0},
                         {"leaf_module", {{"names", {"moe"}}}}};
  if (cell_.off_device()) {
    constexpr double kRatios[] = {1, 1, .5, .8};
    zero["offload_optimizer"] = {
        {"ratio", kRatios[draw(4)]}, {"pipeline_read", chance(70)}, {"pipeline_write", chance(70)}};
    if (chance(25)) zero["offload_gradients"] = {{"device", "none"}};
  }
  nlohmann::json changes = {{"zero_optimization", zero}, {"gradient_clipping", clip}};
  if (cell_.dtype == DType::kFloat16) changes["fp16"] = {{"loss_scale", 64}};  // 64 * the largest coefficient is finite
  settings_ = settings(cell_, accumulation_steps_, changes);

  auto model = lin(kParameters);
  model->tie("a.p", kTied);
  WindowModel::Tensors start;
  for (const Named& named : kParameters) start[named.name] = at::zeros(named.shape, at::kDouble);
  // Updates behind step() may be as late as they like.
  std::optional<LaneHook> slow;
  if (cell_.off_device() && chance(30))
    slow.emplace([](std::string_view what) {
      if (what == "update") std::this_thread::sleep_for(std::chrono::microseconds(300));
    });
  session_ = std::make_unique<Session>(model, settings_, world, board);
  expected_ = std::make_unique<WindowModel>(WindowModel::Rules{world.size(), cell_.managed, accumulation_steps_, clip},
                                            std::move(start));
}

std::string Player::description() const {
  std::ostringstream out;
  out << "seed " << seed_ << ", " << world_.size() << " ranks, rank " << world_.rank() << ", " << settings_.dump();
  return out.str();
}

void Player::play() {
  for (int call = 0; call < kCalls; ++call) {
    const int which = draw(100);
    if (which < 28)
      forward();
    else if (which < 58)
      backward();
    else if (which < 76)
      step();
    else if (which < 79)
      zero_grad();
    else if (which < 84)
      evaluate();
    else if (which < 91)
      read_gradient();
    else if (which < 96)
      open_or_close_scope();
    else
      set_boundary();
    EXPECT_EQ(session_->engine().is_gradient_accumulation_boundary(), expected_->boundary()) << "call " << call;
  }
  scope_.reset();
  for (const Named& named : kParameters) compare_gradient(named.name);
  compare_values();
  session_->post_parameters();
  scope_.reset();
}

std::vector<Player::Term> Player::draw_terms() {
  std::vector<Term> terms;
  const auto add = [&](const std::string& name) {
    terms.push_back({name, static_cast<double>(draw(7) - 3), draw(400) == 0});
  };
  for (const char* name : {"r", "a.p", "b.p", "b.q", "c.p", kTied})
    if (chance(50)) add(name);
  if (chance(60) || terms.empty())  // at least one expert, so that the leaf is touched
    for (int count = 1 + draw(2); count > 0; --count) add("moe.e" + std::to_string(draw(3)) + ".p");
  std::shuffle(terms.begin(), terms.end(), random_);
  return terms;
}

void Player::forward() {
  if (graphs_.size() >= 3) return;
  Graph graph;
  std::vector<Term> common = draw_terms();
  for (int rank = 0; rank < world_.size(); ++rank) {
    std::vector<Term> terms = draw_terms();
    if (cell_.stage == 3) {  // the same units in the same order everywhere, other experts and coefficients
      terms = common;
      for (Term& term : terms) {
        term.coefficient = draw(7) - 3;
        if (term.name.starts_with("moe.")) term.name = "moe.e" + std::to_string(draw(3)) + ".p";
      }
    }
    graph.terms.push_back(std::move(terms));
    graph.left.push_back(1 + draw(3));
  }
  if (cell_.stage == 3) std::fill(graph.left.begin(), graph.left.end(), graph.left.front());
  graph.loss = loss_of(graph.terms[static_cast<std::size_t>(world_.rank())]);
  graphs_.push_back(std::move(graph));
}

at::Tensor Player::loss_of(const std::vector<Term>& terms) {
  at::Tensor loss;
  for (const Term& term : terms) {
    const at::Tensor& p = session_->model().parameter(term.name);
    // The second part has the gradient 0 and needs the parameter's value in backward.
    const at::Tensor part = weighed_sum(p, pattern(p, term.coefficient, term.infinite)) + (p.detach() * p).sum() * 0.0;
    loss = loss.defined() ? loss + part : part;
  }
  return loss;
}

WindowModel::Tensors Player::gradients_of(const std::vector<Term>& terms, double factor) const {
  WindowModel::Tensors gradients;
  for (const Term& term : terms) {
    const std::string name = term.name == kTied ? "a.p" : term.name;
    const at::Tensor gradient = pattern(expected_->value(name), term.coefficient * factor, term.infinite);
    const auto [entry, first] = gradients.try_emplace(name, gradient);
    if (!first) entry->second = entry->second + gradient;
  }
  return gradients;
}

void Player::backward() {
  if (graphs_.empty()) return forward();
  if (expected_->empty()) scaling_ = static_cast<Scaling>(draw(3));
  const auto chosen = std::next(graphs_.begin(), draw(static_cast<int>(graphs_.size())));
  const double factor = 1 + draw(3);
  std::vector<int> times;
  for (int rank = 0; rank < world_.size(); ++rank) times.push_back(chance(60) ? 1 : draw(3));
  if (cell_.stage == 3) std::fill(times.begin(), times.end(), 1);
  for (int rank = 0; rank < world_.size(); ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    for (int i = 0; i < times[r] && chosen->left[r] > 0; ++i) {
      --chosen->left[r];
      BackwardOptions options;
      options.retain_graph = chosen->left[r] > 0;
      options.scale_wrt_gas = scaling_ != Scaling::kSum;
      if (scaling_ == Scaling::kWeights) options.weight = draw(4);
      expected_->backward(rank, gradients_of(chosen->terms[r], factor), options);
      if (rank != world_.rank()) continue;
      session_->engine().backward(chosen->loss * factor, options);
    }
  }
  if (std::all_of(chosen->left.begin(), chosen->left.end(), [](int left) { return left == 0; })) graphs_.erase(chosen);
}

void Player::step() {
  if (scope_) {
    EXPECT_THROW(session_->engine().step(), UseError);
    scope_.reset();
  }
  const StepReport want = expected_->step();
  const StepReport got = session_->step();
  EXPECT_STREQ(to_string(got.reason), to_string(want.reason));
  EXPECT_EQ(got.applied, want.applied);
  EXPECT_EQ(got.micro_batches, want.micro_batches);
  EXPECT_EQ(got.weight, want.weight);
  if (want.applied) {
    EXPECT_NEAR(got.grad_norm, want.grad_norm, 1e-6 * want.grad_norm);
    EXPECT_NEAR(got.clip_factor, want.clip_factor, 1e-6);
    graphs_.clear();  // a backward through them is an error now
    if (chance(30)) compare_values();
  }
  compare_counters();
}

void Player::zero_grad() {
  session_->engine().zero_grad();
  expected_->zero_grad();
}

void Player::evaluate() {
  std::vector<std::string> names;
  for (const Named& named : kParameters) names.push_back(named.name);
  std::shuffle(names.begin(), names.end(), random_);
  names.resize(static_cast<std::size_t>(1 + draw(static_cast<int>(names.size()))));
  const torch::NoGradGuard no_grad;
  const double rounding = cell_.dtype == DType::kFloat32 ? 1e-5 : cell_.dtype == DType::kBFloat16 ? 1e-2 : 2e-3;
  for (const std::string& name : names) {
    const at::Tensor seen = session_->model().parameter(name).to(at::kDouble).cpu();
    const at::Tensor& want = expected_->value(name);
    EXPECT_TRUE(at::allclose(seen, want, rounding, 1e-5)) << name << " as an evaluation sees it";
  }
}

void Player::read_gradient() {
  compare_gradient(kParameters[static_cast<std::size_t>(draw(static_cast<int>(kParameters.size())))].name);
}

// Conservation: what came in is what has landed plus what is pending, to the last integer.
void Player::compare_gradient(const std::string& name) {
  const at::Tensor got = session_->engine().full_grad(name);
  const at::Tensor want = expected_->sum(name);
  EXPECT_EQ(got.defined(), want.defined()) << name;
  if (!got.defined() || !want.defined() || !at::isfinite(want).all().item<bool>()) return;
  const double divisor = expected_->gradient_divisor();
  const at::Tensor sum = got.to(at::kDouble).cpu() * divisor;
  EXPECT_TRUE(at::equal(sum.round(), want)) << name << ": " << sum.flatten() << " for " << want.flatten();
  EXPECT_LE((sum - want).abs().max().item<double>(), 1e-4) << name;
}

void Player::open_or_close_scope() {
  if (scope_) {
    scope_.reset();
  } else if (chance(50)) {
    scope_.emplace(session_->engine().no_sync());
  } else {
    scope_.emplace(session_->engine().coalesce_grad_reduction());
  }
}

void Player::set_boundary() {
  if (!cell_.managed) return;
  const bool boundary = chance(50);
  session_->engine().set_gradient_accumulation_boundary(boundary);
  expected_->set_boundary(boundary);
}

void Player::compare_counters() {
  const Counters got = session_->engine().counters(), want = expected_->counters();
  EXPECT_EQ(got.global_steps, want.global_steps);
  EXPECT_EQ(got.applied_steps, want.applied_steps);
  EXPECT_EQ(got.skipped_steps, want.skipped_steps);
  EXPECT_EQ(got.global_samples, want.global_samples);
  EXPECT_EQ(got.micro_steps, want.micro_steps);
}

void Player::compare_values() {
  for (const Named& named : kParameters) {
    const at::Tensor off =
        session_->engine().full_parameter(named.name).to(at::kDouble).cpu() - expected_->value(named.name);
    EXPECT_LE(off.abs().max().item<double>(), 2e-6) << named.name;
  }
}

}  // namespace ballast::testing
