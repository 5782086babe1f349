#include "cli/trainer.h"

#include <ATen/DeviceAccelerator.h>
#include <torch/torch.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "ballast/base/error.h"
#include "ballast/base/trace.h"
#include "ballast/comm/communicator.h"
#include "ballast/data/permutation.h"
#include "ballast/engine/activation_checkpoint.h"
#include "ballast/models/generate.h"
#include "ballast/tiers/device_span.h"
#include "cli/interrupt.h"

namespace ballast::cli {
namespace {

using Timer = monitor::Breakdown::Timer;
enum Phase : std::size_t { kData, kForward, kBackward, kStep };

std::int64_t count_parameters(const models::GptImpl& model) {
  std::int64_t count = 0;
  for (const at::Tensor& parameter : model.parameters()) count += parameter.numel();
  return count;
}

std::optional<monitor::Breakdown> make_breakdown(bool wanted, c10::Device device) {
  if (!wanted) return std::nullopt;
  std::function<void()> wait;  // the host does a CPU device's work itself
  if (!device.is_cpu()) wait = [device] { at::accelerator::synchronizeDevice(device.index()); };
  return monitor::Breakdown(phase_names(), wait);
}

// The command line has a progress display of its own; the engine's lines say more only where its calls are timed.
Config without_progress_lines(Config config) {
  if (!config.wall_clock_breakdown) config.steps_per_print = 0;
  return config;
}

models::Gpt make_model(const models::GptOptions& options, WeightSource* init) {
  models::Gpt model(options);
  if (init != nullptr) load(*init, *model);
  return model;
}

}  // namespace

std::int64_t window_length(const TrainSection& train, std::int64_t step) {
  const auto choices = static_cast<std::uint64_t>(train.window_max - train.window_min + 1);
  const std::uint64_t drawn = data::mix(data::mix(train.seed) + static_cast<std::uint64_t>(step));
  return train.window_min + static_cast<std::int64_t>(drawn % choices);
}

Trainer::Trainer(const RunFile& run, const World& world, std::shared_ptr<const data::Windows> windows,
                 WeightSource* init)
    : run_(run),
      world_(world),
      windows_(std::move(windows)),
      shape_(resolve_batch(run.engine, world.size())),
      model_(make_model(run.model, init)),
      parameters_(count_parameters(*model_)),
      engine_(model_.ptr(), without_progress_lines(run.engine), world),
      sampler_(windows_->count(data::Part::kTrain), run.train.seed),
      agreement_(world.communicator("run", c10::kCPU), /*bits=*/0),
      breakdown_(make_breakdown(run.engine.wall_clock_breakdown, world.device())) {
  // Dropout draws from LibTorch's default generators, which begin at random.
  torch::manual_seed(data::mix(run.train.seed) + static_cast<std::uint64_t>(world.rank()));
  model_->train();
  if (run.train.activation_checkpointing)
    model_->set_block_runner([](const auto& block, const at::Tensor& x) { return checkpoint(block, x); });
}

at::Tensor Trainer::forward(StepResult& result) {
  data::Batch batch;
  {
    const Timer timer(breakdown(), kData);
    const trace::Span call(trace::Lane::kCaller, "data");
    batch = windows_->read(data::Part::kTrain, sampler_.next(shape_.micro_batch, world_.rank(), world_.size()));
    batch.inputs = batch.inputs.to(world_.device(), /*non_blocking=*/true);
    batch.targets = batch.targets.to(world_.device(), /*non_blocking=*/true);
  }
  const Timer timer(breakdown(), kForward);
  const trace::Span call(trace::Lane::kCaller, "forward");
  const tiers::DeviceSpan work(trace::Lane::kCompute, "forward", {}, world_.device());
  result.tokens += batch.tokens();
  return model_->loss(batch.inputs, batch.targets);
}

StepReport Trainer::run_window(std::int64_t backwards, StepResult& result) {
  const bool managed = run_.engine.managed_gradient_accumulation;
  at::Tensor nats = at::zeros({}, at::TensorOptions(at::kDouble).device(world_.device()));
  StepReport report;
  for (std::int64_t k = 0; k < backwards; ++k) {
    const std::int64_t before = result.tokens;
    const at::Tensor loss = forward(result);
    const auto tokens = static_cast<double>(result.tokens - before);
    nats += loss.detach() * tokens;
    {
      const Timer timer(breakdown(), kBackward);
      if (managed)
        engine_.backward(loss);
      else
        engine_.backward(loss, {.weight = tokens});
    }
    if (managed || k + 1 == backwards) {
      const Timer timer(breakdown(), kStep);
      report = engine_.step();
    }
  }
  result.nats = nats.item<double>();
  return report;
}

StepResult Trainer::step() {
  const auto start = std::chrono::steady_clock::now();
  StepResult result;
  result.step = ++step_;
  const std::string number = trace::on() ? std::to_string(step_) : std::string();
  const trace::Span window(trace::Lane::kSteps, "step", number);
  result.report = run_window(
      run_.engine.managed_gradient_accumulation ? shape_.accumulation_steps : window_length(run_.train, step_), result);
  // One round a window: the loss of all ranks, and whether any of them was told to stop, so that all stop here.
  double nats = 0, tokens = 0;
  for (const auto& of_rank :
       agreement_.exchange({result.nats, static_cast<double>(result.tokens), interrupted() ? 1.0 : 0.0})) {
    nats += of_rank[0];
    tokens += of_rank[1];
    result.stop = result.stop || of_rank[2] != 0;
  }
  result.nats = nats / tokens;
  result.tokens = static_cast<std::int64_t>(tokens);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (breakdown_) result.times = breakdown_->take();

  const bool due = run_.train.eval_every > 0 && step_ % run_.train.eval_every == 0;
  if (!result.stop && windows_->count(data::Part::kHeldOut) > 0 && (due || finished()))
    result.held_out_nats = evaluate().nats;
  return result;
}

std::optional<nlohmann::json> Trainer::resume(const std::optional<ResumePoint>& point) {
  double found = 0;
  for (const auto& of_rank : agreement_.exchange({point ? 1.0 : 0.0})) found += of_rank[0];
  if (found == 0) return std::nullopt;
  if (found < world_.size())
    throw IoError("cli.resume", "not all ranks see the checkpoint (", run_.save_folder().string(), "; ", found, " of ",
                  world_.size(), " do; all ranks must see one folder)");
  LoadReport loaded;
  try {
    loaded = engine_.load_checkpoint(point->folder, point->tag);
  } catch (const UseError&) {  // equal on all ranks; names keys rather than parameters where that says it
    refuse_other_model(run_.model, client_state_of(*point), point->folder.string());
    throw;
  }
  const std::string where = (point->folder / loaded.tag).string();
  const auto state = nlohmann::json::parse(loaded.client_state, nullptr, /*allow_exceptions=*/false);
  if (!state.is_object() || !state.contains("train"))
    throw UseError("cli.resume", "the checkpoint is not one of this program's runs (", where,
                   "; load_checkpoint in a program of yours reads it, --init takes its weights alone)");
  refuse_other_model(run_.model, state, where);
  try {
    take_up(state.at("train"), where);
  } catch (const nlohmann::json::exception& e) {
    throw IoError("cli.resume", "the checkpoint's run is incomplete (", where, "; ", e.what(), ")");
  }
  return state.value("status", nlohmann::json::object());
}

void Trainer::take_up(const nlohmann::json& train, const std::string& where) {
  const data::SamplerState saved{train.at("seed"), train.at("windows"), train.at("drawn")};
  const std::int64_t windows = windows_->count(data::Part::kTrain);
  step_ = train.at("step");
  if (saved.seed != run_.train.seed)
    throw ConfigError("cli.resume", "the run began with another seed (train.seed = ", run_.train.seed,
                      ", the checkpoint's ", saved.seed, ", ", where,
                      "; a run goes on with the seed that it began with)");
  if (saved.windows != windows)
    throw UseError("cli.resume", "the run began with another text (", windows,
                   " windows to train on, the checkpoint's ", saved.windows, ", ", where,
                   "; the section data must be as it was, and its files)");
  if (step_ > run_.train.steps)
    throw ConfigError("cli.resume", "the checkpoint is beyond the run's last step (train.steps = ", run_.train.steps,
                      ", the checkpoint's step ", step_, ", ", where,
                      "; raise train.steps, or --resume an earlier checkpoint)");
  sampler_.restore(saved);
}

void Trainer::save(const nlohmann::json& sums) {
  const data::SamplerState at = sampler_.state();
  const nlohmann::json state = {
      {"train",
       {{"name", run_.train.name}, {"step", step_}, {"seed", at.seed}, {"windows", at.windows}, {"drawn", at.drawn}}},
      {"model", model_to_json(run_.model)},  // what an export needs besides the weights
      {"status", sums}};
  SaveOptions options;
  options.asynchronous = run_.save.asynchronous;
  options.keep_last = static_cast<int>(run_.save.keep_last);
  options.client_state = state.dump();
  engine_.save_checkpoint(run_.save_folder(), tag(), options);
}

Evaluation Trainer::evaluate() {
  return cli::evaluate(*model_, *windows_, run_.train.eval_windows, shape_.micro_batch, world_, agreement_);
}

std::vector<std::int64_t> Trainer::sample() {
  std::vector<std::int64_t> prompt;
  for (const char byte : run_.sample.prompt) prompt.push_back(static_cast<unsigned char>(byte));
  return models::generate(*model_, prompt,
                          {.count = run_.sample.count,
                           .temperature = run_.sample.temperature,
                           .top_k = run_.sample.top_k,
                           .seed = run_.train.seed});
}

}  // namespace ballast::cli
