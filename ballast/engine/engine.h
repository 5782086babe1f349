#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ballast/base/ledger.h"
#include "ballast/comm/world.h"
#include "ballast/config/config.h"
#include "ballast/engine/checkpoint_options.h"
#include "ballast/engine/guards.h"
#include "ballast/grads/step_report.h"

namespace torch::nn {
class Module;
}

namespace ballast {

struct BackwardOptions {
  /// The loss is the mean over `weight` items (tokens, sequences) and counts `weight` times: the step's gradient is the
  /// sum over all ranks' backwards of weight * gradient, divided by the global sum of weights. Finite and >= 0.
  std::optional<double> weight = std::nullopt;
  /// true: a window of K micro-batches averages them. false: it sums them (the loss already carries its share).
  bool scale_wrt_gas = true;
  bool retain_graph = false;
};

/// How an engine is made, beyond its configuration.
struct EngineOptions {
  /// Values of parameters that lie on the meta device, so that a model that fits nowhere whole can be made: rank 0 is
  /// asked for those of one unit after the other (by dotted names; each in its shape, on any device), and the engine
  /// keeps none of the tensors.
  std::function<std::vector<at::Tensor>(const std::vector<std::string>& names)> materialize = nullptr;
  /// The module's buffers by dotted name as they are at a save or a load; null: those that it has registered. For a
  /// module of another language, which assigns new tensors, and has buffers that checkpoints leave out.
  std::function<std::vector<std::pair<std::string, at::Tensor>>()> buffers = nullptr;
};

enum class StateKind : std::uint8_t { kParameters, kGradients, kOptimizer };

struct Counters {
  std::int64_t global_steps = 0;  // window ends with something in them: applied + skipped, as DeepSpeed counts
  std::int64_t applied_steps = 0;
  std::int64_t skipped_steps = 0;   // non-finite
  std::int64_t micro_steps = 0;     // step() calls in managed mode, backwards in caller-owned mode
  std::int64_t global_samples = 0;  // train_batch_size a window
};

/// Trains any torch::nn::Module, unmodified, with its states sharded over the ranks of `world` and placed as `config`
/// says. Not thread-safe: one thread at a time calls it (backward's own threads are the engine's business). Every call
/// marked collective must be made by all ranks in the same order; at stages 0-2 backward() may be called a different
/// number of times by each rank. See docs/windows.md for every rule of the window.
class Engine {
 public:
  /// Collective. Moves the module to the world's device, makes rank 0's parameters everybody's, casts it to the compute
  /// dtype and shards it. Throws ConfigError (what can't work), MemoryError, CommError.
  Engine(std::shared_ptr<torch::nn::Module> module, const Config& config, World world,
         const EngineOptions& options = {});
  ~Engine();  // shutdown(), or abandon() while an exception is on its way; never throws
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Runs the loss's backward and takes the gradients into the window. loss: a scalar on the engine's device.
  void backward(const at::Tensor& loss, const BackwardOptions& options = {});
  /// Autograd's own loss.backward() counts as backward(loss), from its first gradient of a parameter on: it is for code
  /// that doesn't know the engine, and costs nothing but options and, at stages 2-3, that each rank's must reach a
  /// parameter. Where there is a loss scale it must come in somewhere: a gradient that returns through what this gave
  /// out is multiplied by it (not in backward(loss), which has done so). A plain backward that didn't pass here is a
  /// UseError then. outputs: of a forward, what its loss is made of.
  std::vector<at::Tensor> scale_gradients_of(const std::vector<at::Tensor>& outputs);

  /// Collective. Ends the window (caller-owned), or counts a micro-batch and ends the window when it is full (managed).
  StepReport step();

  /// Collective. Drops the window: contributions, weights and count, and what a caller assigned to .grad. Parameters
  /// and optimizer states stay.
  void zero_grad();

  /// Managed mode: will the next step() end the window? Caller-owned: always true.
  bool is_gradient_accumulation_boundary() const;
  /// Managed mode only: overrides that answer until it is called again. UseError in caller-owned mode.
  void set_gradient_accumulation_boundary(bool is_boundary);

  /// While the guard lives, backwards keep their contributions whole on the device (4 bytes a parameter of the units
  /// they touch) and nothing is reduced; the next backward outside it, or step(), reduces the sum.
  [[nodiscard]] ScopeGuard no_sync();
  /// As no_sync, but the end of the guard reduces what was collected (unless a no_sync() still lives: then what that
  /// one keeps, too, is reduced after its end). Collective at its end.
  [[nodiscard]] ScopeGuard coalesce_grad_reduction();

  /// Collective. While the guard lives the full values of these parameters (none: all) are readable by raw pointers.
  /// With a writer rank, that rank's values at the end of the guard become every rank's, master weights included.
  [[nodiscard]] ScopeGuard gathered(const std::vector<at::Tensor>& params = {},
                                    std::optional<int> writer = std::nullopt);

  /// Waits for everything in flight. Collective while an asynchronous save is.
  void synchronize();

  /// Collective. Gives the device's memory back between phases of training (a backend that generates in between): takes
  /// these kinds of states to host memory, the allocator's cache included. An operator that needs a parameter meanwhile
  /// brings its unit back; backward(), step() and access by name want reload_states() first (UseError).
  void offload_states(const std::vector<StateKind>& kinds = {StateKind::kParameters, StateKind::kGradients,
                                                             StateKind::kOptimizer});
  /// Collective. Brings them all back, bit for bit. Nothing to do where none are away.
  void reload_states();

  /// Collective, between calls. Names are the module's dotted parameter names (each name of a tied parameter works).
  /// full_grad: fp32, what the window has so far, divided by its normaliser, before clipping; undefined tensor where no
  /// rank has a contribution. full_parameter: the fp32 master weights. Keys: "exp_avg", "exp_avg_sq" (Adam, AdamW),
  /// "exp_avg" (Lion), "momentum_buffer" (SGD): fp32 of the parameter's shape; and "step": how often the parameter was
  /// updated, fp32 [] as in torch.optim's state (set_: [] or [1], a whole number >= 0). What is read is on the engine's
  /// device. The set_ twins take the same value on every rank. SGD's first update after its momentum_buffer was set
  /// builds on it; one that was never set starts as the first gradient, as in torch.optim.
  at::Tensor full_grad(const std::string& name);
  void set_full_grad(const std::string& name, const at::Tensor& value);
  at::Tensor full_parameter(const std::string& name);
  void set_full_parameter(const std::string& name, const at::Tensor& value);
  at::Tensor full_optimizer_state(const std::string& name, const std::string& key);
  void set_full_optimizer_state(const std::string& name, const std::string& key, const at::Tensor& value);

  /// Collective. Writes a checkpoint folder/tag: every rank its part of the parameters, of the optimizer's states, and
  /// on request of the window's gradients; counters, loss scale, learning rates, random generators; and makes
  /// folder/latest name it. tag: "" for "global_step<N>". The checkpoint appears whole or not at all, and until it does
  /// the ones before stay as they are. Where it fails on any rank, all throw the same IoError (a folder that can't be
  /// written, a full disk) or UseError, and training may go on. One run at a time saves into a folder.
  /// docs/checkpoint_format.md describes the files.
  void save_checkpoint(const std::filesystem::path& folder, const std::string& tag = "",
                       const SaveOptions& options = {});
  /// Collective. Takes up a checkpoint, whatever the number of ranks, the stage, the placement and the units of the
  /// engine that saved it; after one like this training goes on bit for bit. tag: "" for what folder/latest names. The
  /// running window is dropped. Everything is read and compared with its checksums before anything changes, and an
  /// error (IoError: no such checkpoint, a missing, cut or changed file, a newer format; UseError: another model) is
  /// the same on all ranks and leaves the engine as it was.
  LoadReport load_checkpoint(const std::filesystem::path& folder, const std::string& tag = "",
                             const LoadOptions& options = {});

  Counters counters() const;
  double loss_scale() const;
  std::vector<double> lr() const;               // one per parameter group, what the next applied step will use
  int group_of(const std::string& name) const;  // of this parameter; 0: in none of optimizer.params.groups
  void set_lr(const std::vector<double>& lr);   // overrides until the schedule moves on; without a schedule, for good
  const Ledger& memory() const;
  const World& world() const;
  const Config& config() const;

  /// Ends the engine: hooks are removed and the module gets its full parameters back (collective at stage 3, and while
  /// an asynchronous save is under way, unless an error ended it before). Throws what became of that save. Every later
  /// call is a UseError.
  void shutdown();
  /// Ends the engine without its peers, who may be gone or elsewhere: like shutdown(), but an asynchronous save waits a
  /// few seconds at most for what they still write, or is lost with a warning, and at stage 3 the module's parameters
  /// stay what this rank has; to use one is an error then. In a forked child nothing is ended: what the engine has
  /// there goes with the process.
  void abandon() noexcept;

 private:
  struct Impl;
  Impl& running() const;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast
