#include "cli/status.h"

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

#include "ballast/base/bytes.h"
#include "ballast/monitor/progress.h"
#include "cli/print.h"

namespace ballast::cli {
namespace {

double bits_of(double nats) { return nats / std::numbers::ln2; }

double rate(double amount, double seconds) { return seconds > 0 ? amount / seconds : 0; }

}  // namespace

const std::vector<std::string>& phase_names() {
  static const std::vector<std::string> names{"data", "forward", "backward", "step"};
  return names;
}

void Status::add(const StepResult& result, double epoch, const Ledger& memory) {
  last_ = result;
  epoch_ = epoch;
  not_applied_ += result.report.applied ? 0 : 1;
  tokens_ += result.tokens;
  interval_tokens_ += result.tokens;
  seconds_ += result.seconds;
  interval_seconds_ += result.seconds;
  for (std::size_t tier = 0; tier < memory_.size(); ++tier) memory_[tier] = memory.total(static_cast<Tier>(tier));
  if (result.held_out_nats) held_out_nats_ = result.held_out_nats;
}

nlohmann::json Status::sums() const {
  nlohmann::json sums = {{"tokens", tokens_}, {"not_applied", not_applied_}, {"seconds", seconds_}};
  if (held_out_nats_) sums["held_out_nats"] = *held_out_nats_;
  return sums;
}

void Status::go_on(std::int64_t step, const nlohmann::json& sums) {
  last_.step = first_step_ = step;
  tokens_ = sums.value("tokens", std::int64_t{0});
  not_applied_ = sums.value("not_applied", std::int64_t{0});
  seconds_ = first_seconds_ = sums.value("seconds", 0.0);
  if (sums.contains("held_out_nats")) held_out_nats_ = sums["held_out_nats"].get<double>();
}

std::string Status::bits(double nats) const { return print("%.2f bits a ", bits_of(nats)) + unit_; }

std::string Status::line(bool starts_interval) {
  const StepReport& report = last_.report;
  std::string text = print("step %lld/%lld  loss %.3f  ", static_cast<long long>(last_.step),
                           static_cast<long long>(steps_), last_.nats) +
                     bits(last_.nats);
  text += "  " + format_count(rate(static_cast<double>(interval_tokens_), interval_seconds_)) + " " + unit_ + "s/s";
  const double left = (seconds_ - first_seconds_) / static_cast<double>(last_.step - first_step_) *
                      static_cast<double>(steps_ - last_.step);
  text += "  left " + monitor::format_duration(left);
  if (report.applied) {
    text += print("  norm %.3f%s", report.grad_norm, report.clip_factor < 1 ? " clipped" : "");
  } else {
    text += std::string("  not applied: ") + to_string(report.reason);
  }
  if (!report.lr.empty()) text += print("  lr %.2e", report.lr[0]);
  if (scaled_) text += print("  loss scale %.10g", report.loss_scale);
  text += "  memory";
  for (std::size_t tier = 0; tier < memory_.size(); ++tier)
    if (memory_[tier].peak > 0) text += std::string(" ") + kTierNames[tier] + " " + format_bytes(memory_[tier].now);
  if (starts_interval) interval_tokens_ = 0, interval_seconds_ = 0;
  return text;
}

std::string Status::summary() const {
  std::string steps = print("%lld steps", static_cast<long long>(last_.step));
  if (not_applied_ > 0) steps += print(", %lld not applied", static_cast<long long>(not_applied_));
  if (scaled_) steps += print(" (loss scale %.10g)", last_.report.loss_scale);
  return steps + ", " + format_count(static_cast<double>(tokens_)) + " " + unit_ + "s in " +
         monitor::format_duration(seconds_) + " (" + format_count(rate(static_cast<double>(tokens_), seconds_)) + " " +
         unit_ + "s/s)";
}

std::vector<std::string> Status::columns(bool with_times) {
  std::vector<std::string> names{"step",
                                 "tokens",
                                 "epoch",
                                 "seconds",
                                 "loss",
                                 "bits",
                                 "grad_norm",
                                 "clip_factor",
                                 "lr",
                                 "loss_scale",
                                 "micro_batches",
                                 "applied",
                                 "tokens_per_second",
                                 "held_out_loss",
                                 "held_out_bits",
                                 "device_bytes",
                                 "device_peak",
                                 "host_bytes",
                                 "host_peak"};
  if (with_times)
    for (const std::string& phase : phase_names()) names.push_back(phase + "_seconds");
  return names;
}

std::vector<std::optional<double>> Status::row(bool with_times) const {
  const StepReport& report = last_.report;
  const auto& device = memory_[static_cast<std::size_t>(Tier::kDevice)];
  const auto& host = memory_[static_cast<std::size_t>(Tier::kHost)];
  const auto number = [](auto value) { return static_cast<double>(value); };
  std::optional<double> held_out_bits, lr;
  if (last_.held_out_nats) held_out_bits = bits_of(*last_.held_out_nats);
  if (!report.lr.empty()) lr = report.lr[0];
  std::vector<std::optional<double>> cells{number(last_.step),
                                           number(tokens_),
                                           epoch_,
                                           seconds_,
                                           last_.nats,
                                           bits_of(last_.nats),
                                           report.grad_norm,
                                           report.clip_factor,
                                           lr,
                                           report.loss_scale,
                                           number(report.micro_batches),
                                           report.applied ? 1.0 : 0.0,
                                           rate(number(last_.tokens), last_.seconds),
                                           last_.held_out_nats,
                                           held_out_bits,
                                           number(device.now),
                                           number(device.peak),
                                           number(host.now),
                                           number(host.peak)};
  if (with_times)
    for (const double seconds : last_.times) cells.push_back(seconds);
  return cells;
}

std::string format_count(double count) {
  constexpr std::array<const char*, 4> kUnits{"", " k", " M", " G"};
  std::size_t unit = 0;
  while (count >= 999.5 && unit + 1 < kUnits.size()) count /= 1000, ++unit;
  const int decimals = unit == 0 || count >= 99.95 ? 0 : count >= 9.995 ? 1 : 2;
  return print("%.*f", decimals, count) + kUnits[unit];
}

}  // namespace ballast::cli
