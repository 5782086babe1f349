#include "ballast/monitor/breakdown.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <numeric>

namespace ballast::monitor {

Breakdown::Breakdown(std::vector<std::string> phases, std::function<void()> wait)
    : phases_(std::move(phases)), wait_(std::move(wait)), seconds_(phases_.size()), total_(phases_.size()) {}

Breakdown::Timer::Timer(Breakdown* owner, std::size_t phase) : owner_(owner), phase_(phase) {
  if (!owner_) return;
  if (owner_->wait_) owner_->wait_();
  start_ = std::chrono::steady_clock::now();
}

Breakdown::Timer::~Timer() {
  if (!owner_) return;
  try {
    if (owner_->wait_) owner_->wait_();
  } catch (...) {  // the device's error comes again with the next operator, where it can be thrown
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  owner_->seconds_[phase_] += seconds;
  owner_->total_[phase_] += seconds;
}

std::vector<double> Breakdown::take() {
  std::vector<double> taken(seconds_.size());
  taken.swap(seconds_);
  return taken;
}

std::string format_share(double seconds, double whole) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.1f s (%.0f%%)", seconds, whole > 0 ? 100 * seconds / whole : 0);
  return text.data();
}

std::string Breakdown::summary() const {
  const double sum = std::accumulate(total_.begin(), total_.end(), 0.0);
  std::string text;
  for (std::size_t i = 0; i < phases_.size(); ++i)
    text += (i ? ", " : "") + phases_[i] + " " + format_share(total_[i], sum);
  return text;
}

std::string Breakdown::summary(double whole, const std::string& rest) const {
  std::string text;
  double left = whole;
  for (std::size_t i = 0; i < phases_.size(); ++i) {
    text += phases_[i] + " " + format_share(total_[i], whole) + ", ";
    left -= total_[i];
  }
  return text + rest + " " + format_share(std::max(left, 0.0), whole);
}

}  // namespace ballast::monitor
