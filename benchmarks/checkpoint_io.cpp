// Saving and loading a checkpoint against the disk below it, and what a save costs the training: the time of the call,
// synchronous and asynchronous. One rank; the disk's figure is that of bare requests on a new file of the same size,
// made durable, in the same turns. States on NVMe travel twice, and the disk does too: from the swap file or to it. A
// load writes a second one, for which the file system has to find room: there is a figure for that, too.
#include <torch/nn/module.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "ballast/base/bytes.h"
#include "ballast/base/math.h"
#include "ballast/engine/engine.h"
#include "ballast/tiers/disk_queue.h"
#include "ballast/tiers/host_arena.h"
#include "ballast/tiers/run_folder.h"
#include "benchmarks/measure.h"

namespace {

using namespace ballast;
using tiers::DiskOp;
using tiers::DiskOptions;
namespace fs = std::filesystem;

/// Equal parts, a unit each.
struct Model : torch::nn::Module {
  Model(std::int64_t parts, std::int64_t elements) {
    for (std::int64_t i = 0; i < parts; ++i) {
      auto part = std::make_shared<torch::nn::Module>();
      parameters.push_back(part->register_parameter("weight", at::rand({elements})));
      register_module("part" + std::to_string(i), part);
    }
  }
  std::vector<at::Tensor> parameters;
};

/// The disk by itself.
class Disk {
 public:
  Disk(fs::path folder, std::int64_t bytes) : folder_(std::move(folder)), bytes_(round_up(bytes, options_.block_size)) {
    tiers::HostArena arena(options_.block_size * options_.queue_depth, false, c10::kCPU);
    memory_ = arena.allocate(options_.block_size * options_.queue_depth, at::kByte);
    memory_.random_();
  }
  void write() {
    write_anew();
    ::fsync(file_->fd());
  }
  void write_anew() {
    file_.reset();
    file_ = std::make_unique<tiers::DiskFile>(folder_ / "bare", bytes_, 0);
    pass(DiskOp::kWrite);
  }
  void overwrite() { pass(DiskOp::kWrite); }
  void read() { pass(DiskOp::kRead); }
  /// To memory that the system has to find first, as a load's: nothing changes before all of it is there.
  void read_to_fresh_memory() {
    tiers::HostArena arena(bytes_, false, c10::kCPU);
    const at::Tensor whole = arena.allocate(bytes_, at::kByte);
    pass(DiskOp::kRead, static_cast<std::byte*>(whole.mutable_data_ptr()));
  }

 private:
  // whole: where each byte goes; null: into the few blocks of memory_.
  void pass(DiskOp op, std::byte* whole = nullptr) {
    const auto queue = tiers::make_disk_queue(*file_, options_);
    std::int64_t begun = 0;
    const auto begin = [&](std::uint64_t slot) {
      if (begun >= bytes_) return;
      std::byte* const block =
          static_cast<std::byte*>(memory_.mutable_data_ptr()) + static_cast<std::int64_t>(slot) * options_.block_size;
      const tiers::DiskRequest request{
          .op = op, .offset = begun, .data = whole ? whole + begun : block, .bytes = options_.block_size, .tag = slot};
      queue->submit({&request, 1});
      begun += options_.block_size;
    };
    for (int slot = 0; slot < options_.queue_depth; ++slot) begin(static_cast<std::uint64_t>(slot));
    while (const auto completion = queue->reap(true)) begin(completion->tag);
  }

  const fs::path folder_;
  const DiskOptions options_;
  const std::int64_t bytes_;
  at::Tensor memory_;
  std::unique_ptr<tiers::DiskFile> file_;
};

}  // namespace

int main(int argc, char** argv) {
  bench::Flags flags(argc, argv, "Checkpoints against the disk, in the same run.");
  const std::string path = flags.text("path", fs::temp_directory_path().string(), "folder on the disk");
  const std::int64_t parts = flags.number("parts", 8, "units of the model");
  const std::int64_t elements =
      flags.number("elements", 16 << 20, "of each; a checkpoint has 12 bytes of each element");
  const auto turns = static_cast<int>(flags.number("turns", 5, "of each figure, of which the medians count"));
  const std::string offload = flags.text("offload", "none", "of the optimizer: none, cpu, nvme");
  const std::string device = flags.text("device", "cpu", "cpu or cuda");
  flags.finish();

  const tiers::RunFolder folder(path, 0);
  nlohmann::json config = {{"train_micro_batch_size_per_gpu", 1},
                           {"steps_per_print", 0},
                           {"optimizer", {{"type", "AdamW"}}},
                           {"zero_optimization", {{"stage", 2}}}};
  if (offload != "none") config["zero_optimization"]["offload_optimizer"] = {{"device", offload}, {"nvme_path", path}};
  const World world = World::single({.device = device});
  auto model = std::make_shared<Model>(parts, elements);
  model->to(world.device());
  Engine engine(model, Config::from_json(config), world);
  const auto step = [&] {
    at::Tensor loss = at::zeros({}, world.device());
    for (const at::Tensor& parameter : model->parameters) loss = loss + parameter.square().mean();
    engine.backward(loss);
    engine.step();
    engine.synchronize();
  };
  step();

  const fs::path saved = folder.path() / "saved";
  const std::int64_t bytes = 12 * parts * elements;
  Disk disk(folder.path(), bytes);
  const auto save = [&](bool asynchronous) { engine.save_checkpoint(saved, "tag", {.asynchronous = asynchronous}); };
  std::printf("a checkpoint of %s, states of the optimizer on %s; medians of %d turns\n", format_bytes(bytes).c_str(),
              offload == "none" ? ("the device (" + device + ")").c_str() : offload.c_str(), turns);
  const auto report = [&](const char* what, const bench::Turns& turn) {
    const double gigabytes = static_cast<double>(bytes) / 1e9;
    std::printf("%-5s disk %.2f GB/s, checkpoint %.2f GB/s: %.2fx\n", what, gigabytes / turn.base.seconds,
                gigabytes / turn.other.seconds, turn.speed.seconds);
  };
  disk.write(), save(false);
  const bool swapped = offload == "nvme";
  report("save", bench::take_turns(
                     turns, [&] { swapped ? disk.read(), disk.write() : disk.write(); }, [&] { save(false); }));
  const auto load = [&] { engine.load_checkpoint(saved, "tag"), engine.synchronize(); };
  report("load", bench::take_turns(
                     turns, [&] { swapped ? disk.read(), disk.overwrite() : disk.read(); }, load));
  if (swapped)
    report("load, disk to a new file:", bench::take_turns(
                                            turns, [&] { disk.read(), disk.write_anew(); }, load));
  report(
      "load, disk to fresh memory:",
      bench::take_turns(
          turns, [&] { swapped ? disk.read_to_fresh_memory(), disk.overwrite() : disk.read_to_fresh_memory(); }, load));

  save(true);  // takes the memory for snapshots
  engine.synchronize();
  std::vector<double> stall[2], whole;
  for (int turn = 0; turn < turns; ++turn) {
    stall[0].push_back(bench::cost_of([&] { save(false); }).seconds);
    const bench::Stopwatch watch;
    stall[1].push_back(bench::cost_of([&] { save(true); }).seconds);
    engine.synchronize();
    whole.push_back(watch.seconds());
  }
  std::printf("a save holds the training up for %.2f s; asynchronous for %.2f s (%.1fx less), durable after %.2f s\n",
              bench::median(stall[0]), bench::median(stall[1]), bench::median(stall[0]) / bench::median(stall[1]),
              bench::median(whole));
}
