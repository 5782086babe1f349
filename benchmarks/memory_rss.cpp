// What the ledger shows against what the system sees: the peak resident memory of a process that trains, divided by the
// ledger's peak plus the process's size before. Every case runs in processes of its own, which this program starts from
// its own file with torchrun's variables set.

#include <malloc.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "ballast/base/bytes.h"
#include "ballast/engine/engine.h"
#include "ballast/models/gpt.h"
#include "benchmarks/measure.h"

extern char** environ;

namespace {

using namespace ballast;

constexpr double kMostApart = 0.05;

/// A line of /proc/self/status in bytes.
std::int64_t process_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::int64_t kib = 0;
    if (word == key + ":" && status >> kib) return kib * 1024;
  }
  return 0;
}

void forget_peak() {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << 5;  // VmHWM starts again from VmRSS
}

struct Case {
  int stage;
  std::string dtype;
  models::GptOptions model;
};

void train(const Case& c, const World& world, const models::GptOptions& options, int windows,
           const std::function<void(const Engine&)>& at_end) {
  nlohmann::json json = {{"steps_per_print", 0},
                         {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-4}}}}},
                         {"zero_optimization", {{"stage", c.stage}}}};
  if (c.dtype == "bf16") json["bf16"] = {{"enabled", true}};
  models::Gpt model(options);
  Engine engine(model.ptr(), Config::from_json(json), world);
  const at::Tensor tokens = torch::zeros({1, 8}, torch::kLong);  // few: activations aren't the ledger's business
  for (int w = 0; w < windows; ++w) {
    engine.backward(model->loss(tokens, tokens));
    engine.step();
  }
  at_end(engine);
}

int run_rank(const Case& c) {
  const World world = World::from_env({.device = "cpu", .timeout = std::chrono::minutes(2)});
  at::set_num_threads(1);
  models::GptOptions tiny;
  tiny.layers = 1;
  tiny.width = 64;
  tiny.heads = 1;
  train(c, world, tiny, 2, [](const Engine&) {});  // loads what training loads
  forget_peak();
  const std::int64_t before = process_bytes("VmRSS");
  train(c, world, c.model, 3, [&](const Engine& engine) {
    const std::int64_t ledger = engine.memory().total(Tier::kDevice).peak + engine.memory().total(Tier::kHost).peak;
    const std::int64_t peak = process_bytes("VmHWM");
    const double ratio = static_cast<double>(peak) / static_cast<double>(before + ledger);
    char line[200];
    std::snprintf(line, sizeof line, "%d of %d   %d     %-5s  %9s  %9s  %9s  %.3f  %s\n", world.rank(), world.size(),
                  c.stage, c.dtype.c_str(), format_bytes(before).c_str(), format_bytes(ledger).c_str(),
                  format_bytes(peak).c_str(), ratio, std::abs(ratio - 1) <= kMostApart ? "reached" : "MISSED");
    std::cout << line << std::flush;
  });
  return 0;
}

int free_port() {
  const int socket_fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  bind(socket_fd, reinterpret_cast<sockaddr*>(&address), length);
  getsockname(socket_fd, reinterpret_cast<sockaddr*>(&address), &length);
  close(socket_fd);
  return ntohs(address.sin_port);
}

/// Starts this program anew, one process a rank, and waits. True if all ended well.
bool run_processes(int ranks, std::vector<std::string> arguments) {
  const std::string port = std::to_string(free_port());
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::string> variables = {"RANK=" + std::to_string(rank), "LOCAL_RANK=" + std::to_string(rank),
                                          "WORLD_SIZE=" + std::to_string(ranks), "MASTER_ADDR=127.0.0.1",
                                          "MASTER_PORT=" + port};
    for (char** variable = environ; *variable; ++variable) variables.emplace_back(*variable);
    std::vector<char*> argv, env;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    for (std::string& variable : variables) env.push_back(variable.data());
    argv.push_back(nullptr);
    env.push_back(nullptr);
    pid_t child = 0;
    if (posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, argv.data(), env.data()) != 0) return false;
    children.push_back(child);
  }
  bool well = true;
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    well &= WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  return well;
}

}  // namespace

int main(int argc, char** argv) {
  bench::Flags flags(argc, argv, "Peak resident memory against the ledger's peak plus the process's size before.");
  Case c;
  c.model.layers = flags.number("layers", 8, "blocks of the model");
  c.model.width = flags.number("width", 768, "width of the model");
  c.model.heads = flags.number("heads", 12, "attention heads");
  c.dtype = flags.text("dtype", "fp32", "fp32 or bf16");
  const std::int64_t threshold = flags.number(
      "mmap-threshold", 4 << 20,
      "blocks of this many bytes get pages of their own; 0: glibc's way, which raises its threshold to the size of the "
      "blocks that were freed so far and then keeps them in heaps with gaps between them");
  const std::string ranks = flags.text("ranks", "", "only this number of processes");
  c.stage = static_cast<int>(flags.number("stage", -1, "only this stage"));
  const bool child = flags.number("child", 0, "set in the processes that this one starts") != 0;
  flags.finish();
  if (threshold > 0) mallopt(M_MMAP_THRESHOLD, static_cast<int>(threshold));
  if (child) return run_rank(c);

  std::printf("rank     stage  dtype     before     ledger  peak RSS  ratio (wanted: 1 +- %.2f)\n", kMostApart);
  std::fflush(stdout);
  bool well = true;
  for (int world : {1, 2})
    for (int stage = 0; stage < 4; ++stage) {
      if ((c.stage >= 0 && c.stage != stage) || (!ranks.empty() && ranks != std::to_string(world))) continue;
      well &= run_processes(world,
                            {argv[0], "--child", "1", "--stage", std::to_string(stage), "--dtype", c.dtype, "--layers",
                             std::to_string(c.model.layers), "--width", std::to_string(c.model.width), "--heads",
                             std::to_string(c.model.heads), "--mmap-threshold", std::to_string(threshold)});
    }
  return well ? 0 : 1;
}
