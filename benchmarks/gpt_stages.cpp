// Trains a GPT at several stages and placements, one after the other, on the device of each rank, and prints for each
// the speed, the seconds of a window split into forward-backward (with what it waits for updates) and step, and the
// peak memory: of each tier by the ledger, in percent of what plan_memory said before, and by the device's allocator.
// Ranks come from the environment: alone it is one rank; for two GPUs
//
//   torchrun --no-python --nproc-per-node 2 build/cuda/benchmarks/bench_gpt_stages
//
// PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.17 caps the device's memory.

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>

#include "ballast/base/bytes.h"
#include "ballast/base/trace.h"
#include "ballast/engine/activation_checkpoint.h"
#include "ballast/engine/engine.h"
#include "ballast/engine/memory_plan.h"
#include "ballast/engine/module_walk.h"
#include "ballast/models/gpt.h"
#include "ballast/tiers/device_span.h"
#include "benchmarks/measure.h"

namespace {

using namespace ballast;

struct Run {
  models::GptOptions model;
  std::int64_t micro_batch, window, windows, warm_up, max_live, bucket;
  std::string dtype, params, gradients, nvme_path, trace;
  double ratio;
  std::int64_t threads;
  bool checkpointing;
};

void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

c10::DeviceAllocator* allocator_of(c10::Device device) {
  return device.is_cpu() ? nullptr : c10::getDeviceAllocator(device.type());
}

Config config_of(const Run& run, int stage, const std::string& offload) {
  nlohmann::json zero = {{"stage", stage}};
  if (offload != "none")
    zero["offload_optimizer"] = {{"device", offload}, {"ratio", run.ratio}, {"threads", run.threads}};
  if (offload == "nvme") zero["offload_optimizer"]["nvme_path"] = run.nvme_path;
  if (stage == 3 && run.params != "none") zero["offload_param"] = {{"device", run.params}};
  if (stage == 3 && run.params == "nvme")
    zero["offload_param"].update({{"nvme_path", run.nvme_path}, {"max_in_cpu", 0}});
  if (offload != "none" && run.gradients != "auto") zero["offload_gradients"] = {{"device", run.gradients}};
  if (offload != "none" && run.gradients == "nvme") zero["offload_gradients"]["nvme_path"] = run.nvme_path;
  if (run.max_live > 0) zero["stage3_max_live_parameters"] = run.max_live;
  if (run.bucket > 0) zero["reduce_bucket_size"] = run.bucket;
  nlohmann::json json = {{"train_micro_batch_size_per_gpu", run.micro_batch},
                         {"gradient_accumulation_steps", run.window},
                         {"managed_gradient_accumulation", false},
                         {"steps_per_print", 0},
                         {"gradient_clipping", 1.0},
                         {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-4}, {"weight_decay", 0.1}}}}},
                         {"zero_optimization", zero}};
  if (run.dtype != "fp32") json[run.dtype] = {{"enabled", true}};
  return Config::from_json(json);
}

void train(const Run& run, int stage, const std::string& offload, const World& world) {
  const c10::Device device = world.device();
  c10::DeviceAllocator* const allocator = allocator_of(device);
  if (allocator) {
    at::empty({1}, at::TensorOptions(device));  // the allocator knows a device from its first allocation on
    allocator->emptyCache();
    allocator->resetPeakStats(device.index());
  }
  models::Gpt model(run.model);
  if (run.checkpointing)
    model->set_block_runner([](const auto& block, const at::Tensor& x) { return checkpoint(block, x); });
  const Config config = config_of(run, stage, offload);
  const auto plan = plan_memory(make_layout(walk(*model, config).parameters, world.size()), config,
                                {.world = world.size(), .device = device.type(), .backwards = run.window});
  Engine engine(model.ptr(), config, world);

  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(world.rank() + 1);
  const std::int64_t length = run.model.context;
  const at::Tensor tokens = at::randint(0, run.model.vocabulary, {run.window, run.micro_batch, length + 1}, generator,
                                        at::TensorOptions(at::kLong))
                                .to(device);
  std::vector<double> computes, steps;
  double first_loss = 0, last_loss = 0;
  bench::Stopwatch all;
  // Windows follow each other without a pause, as in training: updates behind a step() may run under the next window.
  for (std::int64_t w = 0; w < run.windows + run.warm_up; ++w) {
    if (w == run.warm_up) {
      engine.synchronize();
      synchronize(device);
      all = bench::Stopwatch();
      if (!run.trace.empty()) trace::start();
    }
    at::Tensor loss;
    const bench::Stopwatch watch;
    for (std::int64_t k = 0; k < run.window; ++k) {
      {
        const tiers::DeviceSpan work(trace::Lane::kCompute, "forward", {}, device);
        loss = model->loss(tokens[k].narrow(1, 0, length), tokens[k].narrow(1, 1, length));
      }
      engine.backward(loss);
    }
    synchronize(device);
    const double compute = watch.seconds();
    engine.step();
    if (w == 0) first_loss = loss.item<double>();
    if (w < run.warm_up) continue;
    computes.push_back(compute);
    steps.push_back(watch.seconds() - compute);
    last_loss = loss.item<double>();
  }
  engine.synchronize();
  synchronize(device);
  if (!run.trace.empty())
    trace::write(run.trace + (world.size() > 1 ? ".rank" + std::to_string(world.rank()) : ""), world.rank());
  const double window = all.seconds() / static_cast<double>(run.windows);

  if (world.rank() == 0) {
    const double items = static_cast<double>(world.size() * run.window * run.micro_batch * length);
    std::string allocated = "-", reserved = "-";
    if (allocator) {
      const c10::CachingDeviceAllocator::DeviceStats stats = allocator->getDeviceStats(device.index());
      constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
      allocated = format_bytes(stats.allocated_bytes[kAll].peak);
      reserved = format_bytes(stats.reserved_bytes[kAll].peak);
    }
    const auto peak = [&](Tier tier) {
      const std::int64_t got = engine.memory().total(tier).peak, planned = plan->total(tier).peak;
      if (got == 0 && planned == 0) return std::string("-");
      char percent[32];
      std::snprintf(percent, sizeof percent, ", %.1f%%",
                    100.0 * static_cast<double>(got) / static_cast<double>(planned));
      return format_bytes(got) + percent;
    };
    std::printf("| %d | %s | %lld | %.0f | %.4f: %.4f + %.4f | %s | %s | %s | %s | %s | %.3f, %.3f |\n", stage,
                offload.c_str(), static_cast<long long>(run.window), items / window, window, bench::median(computes),
                bench::median(steps), peak(Tier::kDevice).c_str(), peak(Tier::kHost).c_str(), peak(Tier::kNvme).c_str(),
                allocated.c_str(), reserved.c_str(), first_loss, last_loss);
    std::fflush(stdout);
  }
  engine.shutdown();
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> items;
  std::istringstream in(list);
  for (std::string item; std::getline(in, item, ',');) items.push_back(item);
  return items;
}

}  // namespace

int main(int argc, char** argv) {
  bench::Flags flags(argc, argv, "Speed and memory of a GPT at stages 0-3. The defaults are small enough for a CPU.");
  Run run;
  run.model.layers = flags.number("layers", 4, "blocks of the model");
  run.model.width = flags.number("width", 128, "width of the model");
  run.model.heads = flags.number("heads", 4, "attention heads");
  run.model.vocabulary = flags.number("vocabulary", 256, "size of the vocabulary");
  run.model.context = flags.number("sequence", 64, "tokens a sequence");
  run.micro_batch = flags.number("micro-batch", 4, "sequences a rank and backward");
  const auto window_lengths = split(flags.text("window", "2", "backwards a window; several: 1,4"));
  run.windows = flags.number("windows", 4, "measured windows of each stage");
  run.warm_up = flags.number("warm-up", 2, "windows before: they learn stage 3's order and fill the allocator's cache");
  run.max_live = flags.number("max-live", 0, "stage3_max_live_parameters; 0: the default");
  run.bucket = flags.number("bucket", 0, "reduce_bucket_size; 0: the default");
  run.dtype = flags.text("dtype", "bf16", "fp32, bf16 or fp16");
  run.model.tied_head = flags.number("tied", 1, "0: the output matrix is not the embedding's") != 0;
  run.ratio = static_cast<double>(flags.number("percent", 100, "of the states that --offload moves")) / 100;
  run.params = flags.text("params", "none", "where shards of parameters rest at stage 3: none (device), cpu, nvme");
  run.gradients = flags.text("gradients", "auto", "where sums rest beside offloaded states: auto, none, cpu, nvme");
  run.threads = flags.number("threads", 0, "of host updates; 0: the engine's choice");
  run.nvme_path = flags.text("nvme-path", "/tmp", "folder of swap files, for --offload nvme");
  run.trace = flags.text(
      "trace", "", "file for a Chrome trace of the last combination's measured windows; FILE.rankN of several ranks");
  run.checkpointing = flags.number("checkpointing", 0, "1: recompute each block's activations in backward") != 0;
  const auto stages = split(flags.text("stages", "0,1,2,3", "stages, in this order"));
  const auto offloads = split(
      flags.text("offload", "none", "where the optimizer's states are: none (device), cpu, nvme; several: none,cpu"));
  const std::string device = flags.text("device", "auto", "auto, cpu or cuda");
  flags.finish();

  const World world = World::from_env({.device = device});
  at::empty({1}, at::TensorOptions(world.device()));  // the device's allocator counts from its first allocation on
  if (world.rank() == 0) {
    std::int64_t parameters = 0;
    for (const auto& shape : models::parameter_shapes(run.model)) {
      std::int64_t numel = 1;
      for (std::int64_t size : shape.sizes) numel *= size;
      parameters += numel;
    }
    std::printf(
        "%.1f M parameters, %s, %d rank(s) on %s, micro-batch %lld x %lld, %lld windows\n\n"
        "| stage | offload | window | tokens/s | seconds a window: compute + step | ledger and %% of the plan: device "
        "| host | NVMe | allocated | reserved | loss, first and last "
        "|\n|---|---|---|---|---|---|---|---|---|---|---|\n",
        static_cast<double>(parameters) / 1e6, run.dtype.c_str(), world.size(), world.device().str().c_str(),
        static_cast<long long>(run.micro_batch), static_cast<long long>(run.model.context),
        static_cast<long long>(run.windows));
    std::fflush(stdout);
  }
  for (const std::string& offload : offloads)
    for (const std::string& stage : stages)
      for (const std::string& length : window_lengths) {
        run.window = std::stoll(length);
        train(run, std::stoi(stage), offload, world);
      }
}
