#include "ballast/data/windows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "ballast/base/error.h"
#include "ballast/base/math.h"

namespace ballast::data {
namespace {

constexpr std::int64_t kRun = 64;  // held-out windows in a row, so that few of them border on windows of training

}  // namespace

Windows::Windows(std::shared_ptr<const Corpus> corpus, const WindowOptions& options)
    : corpus_(std::move(corpus)), options_(options) {
  if (options.length < 1) throw ConfigError("data.windows", "must be at least 1 (length = ", options.length, ")");
  if (!(options.held_out >= 0 && options.held_out <= 0.5))
    throw ConfigError("data.windows", "must be in [0, 0.5] (held_out = ", options.held_out, ")");
  total_ = (corpus_->size() - 1) / options.length;
  const std::int64_t needed = options.held_out > 0 ? 2 : 1;
  if (total_ < needed)
    throw IoError("data.windows", "too short for ", needed == 1 ? "a window" : "a window of training and one held out",
                  " (", corpus_->path().string(), ": ", corpus_->size(), " tokens, needed ",
                  needed * options.length + 1, " with windows of ", options.length,
                  "; give more text, or shorter windows: in a run file model.context)");
  if (options.held_out > 0)
    held_out_ = std::max<std::int64_t>(1, std::llround(options.held_out * static_cast<double>(total_)));
  held_out_ = std::min(held_out_, total_ / 2);
  runs_ = ceil_div(held_out_, kRun);
}

// The windows fall into `runs_` stretches of nearly equal length, [g total / runs, (g + 1) total / runs), and the last
// windows of each are held out: (g + 1) held / runs - g held / runs of them.
std::int64_t Windows::start(Part part, std::int64_t i) const {
  if (i < 0 || i >= count(part))
    throw UseError("data.windows", "no such window (got ", i, ", the part has ", count(part), ")");
  if (runs_ == 0) return i * options_.length;
  const auto before = [&](std::int64_t windows, std::int64_t g) { return windows * g / runs_; };
  const auto of_part = [&](std::int64_t g) {  // windows of this part before stretch g
    return part == Part::kHeldOut ? before(held_out_, g) : before(total_, g) - before(held_out_, g);
  };
  std::int64_t low = 0, high = runs_;  // of_part(low) <= i < of_part(high)
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (of_part(middle) <= i ? low : high) = middle;
  }
  const std::int64_t in_stretch = i - of_part(low);
  const std::int64_t held_here = before(held_out_, low + 1) - before(held_out_, low);
  const std::int64_t first = part == Part::kTrain ? before(total_, low) : before(total_, low + 1) - held_here;
  return (first + in_stretch) * options_.length;
}

Batch Windows::read(Part part, std::span<const std::int64_t> indices) const {
  const std::int64_t length = options_.length;
  const at::Tensor inputs = at::empty({static_cast<std::int64_t>(indices.size()), length}, at::kLong);
  const at::Tensor targets = at::empty_like(inputs);
  auto* in = inputs.data_ptr<std::int64_t>();
  auto* out = targets.data_ptr<std::int64_t>();
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(length + 1));
  for (const std::int64_t index : indices) {
    const std::int64_t first = start(part, index);
    corpus_->read(first, tokens);
    const auto bad =
        std::find_if(tokens.begin(), tokens.end(), [&](auto token) { return token >= options_.vocabulary; });
    if (bad != tokens.end())
      throw IoError("data.read", "token outside the vocabulary (got ", *bad, ", vocabulary ", options_.vocabulary, "; ",
                    corpus_->describe(first + (bad - tokens.begin())), ")");
    in = std::copy(tokens.begin(), tokens.end() - 1, in);
    out = std::copy(tokens.begin() + 1, tokens.end(), out);
  }
  return {inputs, targets};
}

}  // namespace ballast::data
