#include "ballast/base/error.h"
#include "ballast/config/config.h"

namespace ballast {

namespace {

std::string text(const std::optional<std::int64_t>& number) { return number ? std::to_string(*number) : "not given"; }

[[noreturn]] void contradiction(const Config& config, int world_size, const std::string& what) {
  throw ConfigError("config.batch", what, " (train_batch_size = ", text(config.train_batch_size),
                    ", train_micro_batch_size_per_gpu = ", text(config.train_micro_batch_size_per_gpu),
                    ", gradient_accumulation_steps = ", text(config.gradient_accumulation_steps),
                    ", ranks = ", world_size, "; want train = micro * steps * ranks)");
}

}  // namespace

BatchShape resolve_batch(const Config& config, int world_size) {
  const auto& train = config.train_batch_size;
  const auto& micro = config.train_micro_batch_size_per_gpu;
  const auto& steps = config.gradient_accumulation_steps;
  for (const auto& number : {train, micro, steps}) {
    if (number && *number < 1) contradiction(config, world_size, "a batch size below 1");
  }
  const auto divide = [&](std::int64_t number, std::int64_t by) {
    if (number % by != 0) contradiction(config, world_size, "the batch does not divide");
    return number / by;
  };
  const auto multiply = [&](std::int64_t a, std::int64_t b) {
    std::int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product)) contradiction(config, world_size, "the batch is too large");
    return product;
  };
  BatchShape shape{};
  if (train && micro) {
    shape = {*train, *micro, divide(*train, multiply(*micro, world_size))};
  } else if (train) {
    shape = {*train, divide(*train, multiply(steps.value_or(1), world_size)), steps.value_or(1)};
  } else {
    shape = {0, micro.value_or(1), steps.value_or(1)};
    shape.train_batch = multiply(multiply(shape.micro_batch, shape.accumulation_steps), world_size);
  }
  if (steps && *steps != shape.accumulation_steps) contradiction(config, world_size, "the batch sizes contradict");
  return shape;
}

void check_batch(const Config& config, const std::string& at) {
  const std::int64_t micro = config.train_micro_batch_size_per_gpu.value_or(1);
  const std::int64_t steps = config.gradient_accumulation_steps.value_or(1);
  if (!config.train_batch_size) return;
  std::int64_t product = 0;
  if (!__builtin_mul_overflow(micro, steps, &product) && *config.train_batch_size % product == 0) return;
  throw ConfigError("config.batch", "the batch sizes fit no number of ranks (", at,
                    "train_batch_size = ", *config.train_batch_size, ", ", at,
                    "train_micro_batch_size_per_gpu = ", text(config.train_micro_batch_size_per_gpu), ", ", at,
                    "gradient_accumulation_steps = ", text(config.gradient_accumulation_steps),
                    "; want train = micro * steps * ranks)");
}

}  // namespace ballast
