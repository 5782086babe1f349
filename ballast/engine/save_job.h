#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ballast/base/ledger.h"
#include "ballast/checkpoint/checkpoint_folder.h"
#include "ballast/checkpoint/safetensors.h"

namespace ballast {

/// What this rank does to the folder in one save: writes its file, and on rank 0 makes the checkpoint appear once all
/// ranks' files are there. How ranks know of each other: each leaves, as the last thing it writes, a small record
/// beside its file, and rank 0 waits for all of them. So a save that runs behind the training needs no collective,
/// which would have to be ordered among those of the training; whether it went well, the ranks tell each other at the
/// next call in which they meet anyway.
class SaveJob {
 public:
  struct Target {
    ckpt::CheckpointFolder folder;
    ckpt::Manifest manifest;  // rank 0's counts
    std::vector<ckpt::TensorSpec> tensors;
    int rank, world, keep_last;
    std::chrono::milliseconds timeout;  // for the other ranks' records
    c10::Device device;                 // where tensors may lie
    bool pin_memory;                    // that they travel through
  };
  explicit SaveJob(Target target) : target_(std::move(target)) {}
  /// Waits for the thread, which gives the other ranks' records a moment: they may end just now, too. What goes wrong
  /// is a warning.
  ~SaveJob();
  SaveJob(const SaveJob&) = delete;
  SaveJob& operator=(const SaveJob&) = delete;

  /// Takes the tensors of the file in order, each whole or in parts.
  using Sink = std::function<void(const at::Tensor&)>;
  const std::string& tag() const { return target_.manifest.tag; }

  /// Rank 0: makes the place to write to.
  void begin() const;
  /// Opens this rank's file, lets `produce` give its tensors to a sink, in order, and makes it durable. IoError.
  void write(const std::function<void(const Sink&)>& produce);
  /// Rank 0, others: nothing. Waits for the records and makes the checkpoint appear. IoError.
  void commit();
  /// Rank 0, after a failure, with all ranks at rest: removes what was written.
  void clean_up() const noexcept;

  /// write() of these tensors and commit(), on a thread of its own. They stay as they are until it is settled.
  void start(std::vector<at::Tensor> snapshot);
  enum class State : std::uint8_t { kRunning, kDone, kFailed };
  State state() const { return state_.load(std::memory_order_acquire); }  // pairs with the thread's last store
  /// Doesn't wait for the other ranks' records any more: one of them has the error.
  void abandon() noexcept { abandoned_.store(true, std::memory_order_relaxed); }
  /// Waits for the thread, and throws what ended it, unless that was abandon().
  void settle();

 private:
  Target target_;
  std::thread thread_;
  std::atomic<State> state_{State::kRunning};
  std::atomic<bool> abandoned_{false}, ending_{false};
  std::exception_ptr error_;  // of the thread, read behind its end
};

/// Host memory that snapshots are taken to, kept from one save to the next.
class SnapshotMemory {
 public:
  /// A tensor for each of these, undefined; what was in the memory before is gone. pin: for copies from `device`.
  /// Throws MemoryError.
  std::vector<at::Tensor> take(const std::vector<ckpt::TensorSpec>& tensors, bool pin, c10::Device device,
                               const std::shared_ptr<Ledger>& ledger);

 private:
  at::Tensor memory_;  // bytes
  Ledger::Entry entry_;
};

}  // namespace ballast
