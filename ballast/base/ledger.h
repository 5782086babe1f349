#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>

namespace ballast {

/// What an allocation holds.
enum class MemoryKind : std::uint8_t { kParams, kGrads, kOptimizer, kStaging, kGathered };
inline constexpr std::array<const char*, 5> kMemoryKindNames{"params", "grads", "optimizer", "staging", "gathered"};

/// Where it lies. On a CPU device, device and host are the same memory and still two tiers of the ledger.
enum class Tier : std::uint8_t { kDevice, kHost, kNvme };
inline constexpr std::array<const char*, 3> kTierNames{"device", "host", "nvme"};

/// Bytes now and at most since the start (or the last reset_peaks), by kind and tier. Peaks of different cells need
/// not coincide; `peak(tier)` is the peak of the tier's sum.
class Ledger {
 public:
  struct Cell {
    std::int64_t now = 0, peak = 0;
  };

  /// Bytes under a tag for as long as the handle lives. Move-only; the ledger outlives it by shared ownership.
  class Entry {
   public:
    Entry() = default;
    Entry(Entry&& from) noexcept;
    Entry& operator=(Entry from) noexcept;
    ~Entry();
    std::int64_t bytes() const noexcept { return bytes_; }

   private:
    friend class Ledger;
    Entry(std::shared_ptr<Ledger> ledger, MemoryKind kind, Tier tier, std::int64_t bytes) noexcept;
    std::shared_ptr<Ledger> ledger_;
    MemoryKind kind_{};
    Tier tier_{};
    std::int64_t bytes_ = 0;
  };

  static std::shared_ptr<Ledger> create();
  /// Counts `bytes` from now until the entry dies.
  [[nodiscard]] Entry track(MemoryKind kind, Tier tier, std::int64_t bytes);

  Cell cell(MemoryKind kind, Tier tier) const;
  Cell total(Tier tier) const;
  void reset_peaks();

 private:
  Ledger() = default;
  void add(MemoryKind kind, Tier tier, std::int64_t bytes) noexcept;

  mutable std::mutex mutex_;  // entries are made and dropped by autograd's and the engine's threads
  std::array<std::array<Cell, 3>, 5> cells_{};
  std::array<Cell, 3> totals_{};
  std::weak_ptr<Ledger> self_;
};

}  // namespace ballast
