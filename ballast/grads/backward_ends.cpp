#include "ballast/grads/backward_ends.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

namespace ballast {
namespace {

// Of all engines, which come and go on several threads, as their backwards do. The lock guards the list and who awaits
// what; it isn't held while a sink runs, which may wait for peers.
std::mutex mutex;
std::vector<std::shared_ptr<BackwardEnds::Awaited>> everybody;
at::CallbackHandle observer = 0;

// The outermost backwards whose nodes run on this thread, innermost node last: a re-entrant backward runs its nodes
// inside the node that called it, on the same thread.
thread_local std::vector<int> running;
thread_local int announced = -1;  // whose end was asked for last

void at_end(int outermost) {
  if (torch::autograd::get_current_node()) return;  // inside a node of the outermost one: that is still to end
  std::vector<std::shared_ptr<BackwardEnds::Awaited>> waiting;
  {
    const std::lock_guard lock(mutex);
    for (const auto& one : everybody)
      if (one->outermost == outermost) waiting.push_back(one);
    for (const auto& one : waiting) one->outermost = -1;
  }
  for (const auto& one : waiting) one->sink();
}

std::unique_ptr<at::ObserverContext> before_node(const at::RecordFunction&) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (running.empty() && task != announced && task != -1) {
    announced = task;
    torch::autograd::Engine::get_default_engine().queue_callback([task] { at_end(task); });
  }
  running.push_back(running.empty() ? task : running.back());
  return nullptr;
}

void after_node(const at::RecordFunction&, at::ObserverContext*) {
  if (!running.empty()) running.pop_back();  // empty: the observer came while the node ran
}

}  // namespace

BackwardEnds::BackwardEnds(std::function<void()> sink) : awaited_(std::make_shared<Awaited>(Awaited{std::move(sink)})) {
  const std::lock_guard lock(mutex);
  if (everybody.empty())
    observer = at::addGlobalCallback(
        at::RecordFunctionCallback(&before_node, &after_node).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  everybody.push_back(awaited_);
}

BackwardEnds::~BackwardEnds() {
  const std::lock_guard lock(mutex);
  std::erase(everybody, awaited_);
  if (everybody.empty()) at::removeCallback(observer);
}

void BackwardEnds::await(int outermost) {
  const std::lock_guard lock(mutex);
  awaited_->outermost = outermost;
}

int BackwardEnds::outermost() noexcept {
  // A node's own hooks run after it: then those on the list are the nodes around it.
  return running.empty() ? torch::autograd::get_current_graph_task_id() : running.back();
}

}  // namespace ballast
