// The engine from Python against the engine from C++ and against plain PyTorch, at stage 0 on one rank: the same model,
// the same batches, windows of the three taking turns. The Python sides run in a child, python_overhead.py.

#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "ballast/engine/engine.h"
#include "benchmarks/measure.h"

namespace {

using namespace ballast;

constexpr double kLeastOfCpp = 0.95, kLeastOfPlain = 0.97;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct Net : torch::nn::Module {
  Net(std::int64_t vocabulary, std::int64_t layers, std::int64_t width) {
    embedding = register_module("embedding", torch::nn::Embedding(vocabulary, width));
    for (std::int64_t i = 0; i < layers; ++i) blocks->push_back(Block(width));
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(width, vocabulary));
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) {
    at::Tensor x = embedding(tokens);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return torch::nn::functional::cross_entropy(head(x).flatten(0, 1), targets.flatten());
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};

// The child, which answers a line with a line.
class Child {
 public:
  explicit Child(const std::vector<std::string>& command) {
    int to[2], from[2];
    if (pipe(to) != 0 || pipe(from) != 0) throw std::runtime_error("pipe failed");
    process_ = fork();
    if (process_ == 0) {
      dup2(to[0], STDIN_FILENO);
      dup2(from[1], STDOUT_FILENO);
      for (const int end : {to[0], to[1], from[0], from[1]}) close(end);
      std::vector<char*> arguments;
      for (const std::string& part : command) arguments.push_back(const_cast<char*>(part.c_str()));
      arguments.push_back(nullptr);
      execv(arguments[0], arguments.data());
      std::perror(arguments[0]);
      _exit(127);
    }
    close(to[0]);
    close(from[1]);
    to_ = fdopen(to[1], "w");
    from_ = fdopen(from[0], "r");
  }
  ~Child() {
    std::fclose(to_);
    std::fclose(from_);
    waitpid(process_, nullptr, 0);
  }
  double seconds_of(const char* window) {
    std::fprintf(to_, "%s\n", window);
    std::fflush(to_);
    double seconds = 0, loss = 0;
    if (std::fscanf(from_, "%lf %lf", &seconds, &loss) != 2)
      throw std::runtime_error("python_overhead.py ended (its message stands above)");
    return seconds;
  }

 private:
  pid_t process_ = -1;
  std::FILE *to_ = nullptr, *from_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  bench::Flags flags(argc, argv, "Speed of the engine called from Python, one rank, stage 0, on the CPU.");
  const std::int64_t vocabulary = flags.number("vocabulary", 256, "size of the vocabulary");
  const std::int64_t layers = flags.number("layers", 8, "blocks of the model");
  const std::int64_t width = flags.number("width", 256, "width of the model");
  const std::int64_t sequence = flags.number("sequence", 128, "tokens a sequence");
  const std::int64_t batch = flags.number("batch", 8, "sequences a window");
  const auto turns = static_cast<int>(flags.number("turns", 21, "windows of each side"));
  flags.finish();

  setenv("PYTHONPATH", BALLAST_PYTHON_FOLDER, /*overwrite=*/1);
  Child python({BALLAST_PYTHON, BALLAST_SOURCE_DIR "/benchmarks/python_overhead.py", std::to_string(vocabulary),
                std::to_string(layers), std::to_string(width), std::to_string(sequence), std::to_string(batch)});

  const auto model = std::make_shared<Net>(vocabulary, layers, width);
  const auto config =
      Config::from_json({{"train_micro_batch_size_per_gpu", batch},
                         {"steps_per_print", 0},
                         {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-4}, {"weight_decay", 0.1}}}}}});
  Engine engine(model, config, World::single({.device = "cpu"}));
  torch::manual_seed(1);
  const at::Tensor data = torch::randint(vocabulary, {batch, sequence + 1});
  const at::Tensor tokens = data.narrow(1, 0, sequence).contiguous();
  const at::Tensor targets = data.narrow(1, 1, sequence).contiguous();
  const auto window = [&] {
    const bench::Stopwatch watch;
    const at::Tensor loss = model->forward(tokens, targets);
    engine.backward(loss);
    engine.step();
    loss.item<double>();
    return watch.seconds();
  };

  std::vector<double> cpp, plain, ours;
  for (int turn = -3; turn < turns; ++turn) {  // the first warm up
    const double a = python.seconds_of("plain"), b = python.seconds_of("engine"), c = window();
    if (turn < 0) continue;
    plain.push_back(a);
    ours.push_back(b);
    cpp.push_back(c);
  }
  const double of_cpp = bench::median(cpp) / bench::median(ours), of_plain = bench::median(plain) / bench::median(ours);
  std::printf("plain PyTorch       %8.2f ms a window (median of %d)\n", bench::median(plain) * 1e3, turns);
  std::printf("engine from C++     %8.2f ms\n", bench::median(cpp) * 1e3);
  std::printf("engine from Python  %8.2f ms\n", bench::median(ours) * 1e3);
  std::printf("its speed is %.3f of the engine's from C++ (wanted: at least %.2f) %s\n", of_cpp, kLeastOfCpp,
              of_cpp >= kLeastOfCpp ? "reached" : "MISSED");
  std::printf("and %.3f of plain PyTorch's (wanted: at least %.2f) %s\n", of_plain, kLeastOfPlain,
              of_plain >= kLeastOfPlain ? "reached" : "MISSED");
}
