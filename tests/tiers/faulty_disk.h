#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>

#include "ballast/tiers/disk_queue.h"

namespace ballast::tiers {

/// What happens to one request.
struct Fault {
  enum class Kind : std::uint8_t { kNone, kShort, kError, kFlip, kSlow } kind = Kind::kNone;
  std::int64_t value = 0;  // bytes moved, errno, number of the bit flipped in what was read, milliseconds

  static Fault none() { return {}; }
  static Fault moves_only(std::int64_t bytes) { return {Kind::kShort, bytes}; }
  static Fault error(int number) { return {Kind::kError, number}; }
  static Fault flips(std::int64_t bit) { return {Kind::kFlip, bit}; }
  static Fault takes(std::chrono::milliseconds time) { return {Kind::kSlow, time.count()}; }
};

using Plan = std::function<Fault(const DiskRequest&)>;

/// A queue whose disk misbehaves as planned: moves fewer bytes, fails without moving any, flips a bit, takes its time.
class FaultyDisk final : public DiskQueue {
 public:
  FaultyDisk(std::unique_ptr<DiskQueue> disk, Plan plan) : disk_(std::move(disk)), plan_(std::move(plan)) {}

  const char* name() const noexcept override { return disk_->name(); }
  int depth() const noexcept override { return disk_->depth(); }
  int in_flight() const noexcept override { return disk_->in_flight() + static_cast<int>(failed_.size()); }
  void submit(std::span<const DiskRequest> requests) override;
  std::optional<DiskCompletion> reap(bool wait) override;
  bool register_buffers(std::span<const std::span<std::byte>> buffers) override {
    return disk_->register_buffers(buffers);
  }

 private:
  struct Flip {
    std::byte* data;
    std::int64_t bit;
  };
  std::unique_ptr<DiskQueue> disk_;
  const Plan plan_;
  std::deque<DiskCompletion> failed_;
  std::unordered_map<std::uint64_t, Flip> flips_;  // by tag
};

/// While it lives, every disk of this process follows the plan; the plan is called by whoever drives the disk.
class FaultyDisks {
 public:
  explicit FaultyDisks(Plan plan);
  ~FaultyDisks();
  FaultyDisks(const FaultyDisks&) = delete;
  FaultyDisks& operator=(const FaultyDisks&) = delete;
};

}  // namespace ballast::tiers
