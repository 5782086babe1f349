#pragma once

#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "ballast/base/process_mark.h"
#include "ballast/base/trace.h"
#include "ballast/engine/engine.h"
#include "ballast/engine/module_claim.h"
#include "ballast/engine/policies.h"
#include "ballast/engine/progress_log.h"
#include "ballast/engine/save_job.h"
#include "ballast/engine/save_plan.h"
#include "ballast/grads/backward_ends.h"
#include "ballast/grads/gradient_store.h"
#include "ballast/grads/hooks.h"
#include "ballast/grads/loss_scaler.h"
#include "ballast/grads/reducer.h"
#include "ballast/grads/window.h"
#include "ballast/optim/optimizer_states.h"
#include "ballast/optim/schedule.h"
#include "ballast/params/param_store.h"
#include "ballast/tiers/host_lane.h"

namespace ballast {

struct LoadPlan;

/// The engine's parts and what is common to its calls. engine.cpp: construction and the small calls; backward.cpp;
/// step.cpp: the window's end; access.cpp: full values by name; gathered.cpp: the guard; move_states.cpp: states taken
/// away and brought back; save_checkpoint.cpp, load_checkpoint.cpp: states on disk. Members are destroyed in reverse
/// order: hooks first, then what they feed.
struct Engine::Impl {
  Impl(std::shared_ptr<torch::nn::Module> module, const Config& config, World world, const EngineOptions& options);

  /// First line of every call: rethrows what ended the engine, or an error that a guard's destructor had to keep.
  void check_usable();
  /// UseError in a forked child: threads, connections and files are its parent's.
  void refuse_in_child() const;
  /// Runs a part that talks to peers or memory. Its failure is final: every later call throws the same.
  template <class F>
  auto final_on_error(F&& f) -> decltype(f()) {
    try {
      return f();
    } catch (const UseError&) {  // equal on all ranks, nothing changed
      throw;
    } catch (...) {
      end_with(std::current_exception());
      throw;
    }
  }
  /// What ParamStore asks for, by way of EngineOptions::materialize on rank 0. Collective.
  std::vector<at::Tensor> materialize(const EngineOptions& options, const std::vector<int>& parameters);
  void end_with(std::exception_ptr cause) {
    failure = cause;
    if (params) params->refuse(cause);
  }
  ScopeGuard guard(std::function<void()> end);

  /// A backward between its begin and its end.
  struct Backward {
    Window before;  // in case that it fails before any gradient has arrived
    int outermost;  // of a plain loss.backward(), autograd's number for it; -1: of engine.backward()
    bool gradient_arrived = false;
    trace::Span call{trace::Lane::kCaller, "backward"};
    std::unique_ptr<monitor::Breakdown::Timer> timer;
  };
  void begin_backward(const BackwardOptions& options, int outermost);
  void end_backward();
  /// After an exception in it.
  void fail_backward();
  void backward(const at::Tensor& loss, const BackwardOptions& options);
  /// A gradient of this engine is on its way in a backward that nobody announced. scaled: by loss_scale().
  void join_plain_backward(bool scaled);
  void take_gradient(int parameter, at::Tensor gradient);
  Announcement announce(bool reduce) const;
  /// All ranks are in this call, on this unit.
  Agreed meet(Call call, int unit);
  StepReport step();
  /// UseError where a caller has assigned to .grad of a parameter: nobody would look there.
  void refuse_assigned_gradients() const;
  StepReport report(StepReason reason, const Agreed& agreed) const;
  double norm_squared();
  void update(double factor, const Agreed& agreed);
  void update(int unit, const UpdateStep& step);
  std::unique_ptr<HostSums> make_host_sums(const std::vector<Tier>& states_tier);
  void drop_window();
  void end_coalesce();
  void rebind(int unit);
  void refuse_while_away(const char* operation) const;
  /// Collective. UseError on all ranks where one wrote a parameter of these units that is not its own to write.
  void refuse_lost_writes_anywhere(const std::vector<int>& units);
  /// UseError while a backward runs: what the call would end or change is half there.
  void refuse_in_backward(const char* operation) const;
  /// All ranks are in this call on this parameter, and ask for the same. UseError where they don't.
  void meet_on_parameter(const char* operation, int parameter, const std::string& key = "");
  void end_gathered(const std::vector<int>& parameters, std::optional<int> writer);
  struct Normaliser {
    Window::Scaling scaling;
    double divisor;
  };
  /// Collective. What the window's sum would be divided by if it were complete now; ranks without a backward take the
  /// others' word for how.
  Normaliser prospective_normaliser();
  at::Tensor whole_on_device(int unit, const at::Tensor& kept);
  void write_state(int parameter, const std::string& key, const at::Tensor& value);

  /// Collective: the ranks are in one call, and no save is under way any more.
  Agreed begin_checkpoint_call();
  NamedTensors buffers() const;
  std::string describe_scheduler() const;
  ckpt::WindowRecord describe_window();
  ckpt::Manifest describe_run(const std::string& tag, const SaveOptions& options) const;
  void save(const std::filesystem::path& folder, const std::string& tag, const SaveOptions& options,
            const Agreed& agreed);
  void produce(const SavePlan& plan, bool with_gradients, const SaveJob::Sink& sink);
  void write_now(const SavePlan& plan, bool with_gradients, SaveJob& job);
  void start_save(const SavePlan& plan, bool with_gradients, std::unique_ptr<SaveJob>& job);
  /// Runs a step of a save. What fails on all ranks alike leaves nothing in the folder; a lost rank ends the engine.
  void or_clean_up(const SaveJob& job, const std::function<void()>& step);
  /// Collective while a save is under way: is it over on all ranks? Throws its error, once, on all of them.
  bool poll_save();
  void finish_save();  // waits for that
  LoadReport load(const std::filesystem::path& folder, const std::string& tag, const LoadOptions& options,
                  std::int64_t pending);
  void take_up_unit(const Unit& unit, const LoadPlan& plan, const std::vector<SpareStates>& values, bool with_optimizer,
                    tiers::BounceBuffer& bounce);
  void take_up_run(const ckpt::Manifest& manifest, const LoadOptions& options);
  void take_up_window(const ckpt::WindowRecord& record, int saved_world);

  const ProcessMark process;
  Config config;
  World world;
  std::shared_ptr<torch::nn::Module> module;
  const std::function<NamedTensors()> given_buffers;  // EngineOptions::buffers
  ModuleClaim claim;
  std::shared_ptr<Ledger> ledger;
  BatchShape batch;
  Policies policies;
  Layout layout;
  std::shared_ptr<Communicator> gather, reduce;
  std::unique_ptr<Rounds> rounds;
  std::unique_ptr<OptimizerStates> optimizer;
  std::unique_ptr<ParamStore> params;
  std::unique_ptr<GradientStore> grads;
  std::unique_ptr<Reducer> reducer;
  Window window;
  LossScaler scaler;
  Schedule schedule;
  std::vector<double> lr;           // of the next applied step
  std::int64_t schedule_begin = 0;  // applied steps at which the schedule began
  Counters counters;
  ProgressLog progress;
  std::string run = ckpt::new_run();  // rank 0's counts
  int no_sync_guards = 0, coalesce_guards = 0;
  std::unique_ptr<Backward> running_backward;
  bool warned_rounded_weight = false;
  SnapshotMemory snapshot;          // of the save under way
  std::unique_ptr<SaveJob> saving;  // the asynchronous save under way; the same on all ranks
  std::set<StateKind> away;         // taken to the host by offload_states()
  std::exception_ptr failure;       // ended the engine
  std::exception_ptr kept;          // of a guard's destructor, thrown by the next call
  // Ends before what its jobs work on, after what feeds it. Null where all states lie on the device.
  std::unique_ptr<tiers::HostLane> lane;
  std::unique_ptr<GradientHooks> hooks;
  std::unique_ptr<BackwardEnds> backward_ends;
  std::shared_ptr<const bool> alive =
      std::make_shared<const bool>(true);  // guards hold it weakly: shutdown() may come first
};

}  // namespace ballast
