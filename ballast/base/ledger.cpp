#include "ballast/base/ledger.h"

#include <algorithm>
#include <utility>

namespace ballast {

Ledger::Entry::Entry(std::shared_ptr<Ledger> ledger, MemoryKind kind, Tier tier, std::int64_t bytes) noexcept
    : ledger_(std::move(ledger)), kind_(kind), tier_(tier), bytes_(bytes) {
  ledger_->add(kind_, tier_, bytes_);
}

Ledger::Entry::Entry(Entry&& from) noexcept
    : ledger_(std::move(from.ledger_)), kind_(from.kind_), tier_(from.tier_), bytes_(std::exchange(from.bytes_, 0)) {}

Ledger::Entry& Ledger::Entry::operator=(Entry from) noexcept {
  std::swap(ledger_, from.ledger_);
  std::swap(kind_, from.kind_);
  std::swap(tier_, from.tier_);
  std::swap(bytes_, from.bytes_);
  return *this;
}

Ledger::Entry::~Entry() {
  if (ledger_) ledger_->add(kind_, tier_, -bytes_);
}

std::shared_ptr<Ledger> Ledger::create() {
  std::shared_ptr<Ledger> ledger(new Ledger);
  ledger->self_ = ledger;
  return ledger;
}

Ledger::Entry Ledger::track(MemoryKind kind, Tier tier, std::int64_t bytes) {
  return Entry(self_.lock(), kind, tier, bytes);
}

Ledger::Cell Ledger::cell(MemoryKind kind, Tier tier) const {
  std::lock_guard lock(mutex_);
  return cells_[static_cast<std::size_t>(kind)][static_cast<std::size_t>(tier)];
}

Ledger::Cell Ledger::total(Tier tier) const {
  std::lock_guard lock(mutex_);
  return totals_[static_cast<std::size_t>(tier)];
}

void Ledger::reset_peaks() {
  std::lock_guard lock(mutex_);
  for (auto& row : cells_)
    for (Cell& cell : row) cell.peak = cell.now;
  for (Cell& cell : totals_) cell.peak = cell.now;
}

void Ledger::add(MemoryKind kind, Tier tier, std::int64_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  const auto t = static_cast<std::size_t>(tier);
  for (Cell* cell : {&cells_[static_cast<std::size_t>(kind)][t], &totals_[t]}) {
    cell->now += bytes;
    cell->peak = std::max(cell->peak, cell->now);
  }
}

}  // namespace ballast
