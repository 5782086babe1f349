#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ballast/data/corpus.h"

namespace ballast::data {

/// int64 [windows, length] each, on the CPU; targets are the inputs moved on by one token.
struct Batch {
  at::Tensor inputs, targets;
  std::int64_t tokens() const { return inputs.numel(); }
};

struct WindowOptions {
  std::int64_t length = 128;      // tokens that a window predicts; it reads one more
  double held_out = 0.01;         // share of the windows that training never sees, 0 to 0.5
  std::int64_t vocabulary = 256;  // a token beyond it is an error
};

enum class Part : std::uint8_t { kTrain, kHeldOut };

/// A corpus cut into windows of equal length, one after the other, in two parts. The held-out part is runs of 64
/// windows spread evenly over the corpus, the same for every seed; with a share above 0 it has at least one window.
class Windows {
 public:
  /// Throws ConfigError (an option out of range), IoError (a corpus too short: with sizes).
  Windows(std::shared_ptr<const Corpus> corpus, const WindowOptions& options);

  std::int64_t count(Part part) const noexcept { return part == Part::kTrain ? total_ - held_out_ : held_out_; }
  std::int64_t length() const noexcept { return options_.length; }
  const Corpus& corpus() const noexcept { return *corpus_; }

  /// First token of the part's window i, 0 <= i < count(part).
  std::int64_t start(Part part, std::int64_t i) const;
  /// The windows with these indices, one a row. Throws IoError on a token outside the vocabulary (file and place).
  Batch read(Part part, std::span<const std::int64_t> indices) const;

 private:
  std::shared_ptr<const Corpus> corpus_;
  WindowOptions options_;
  std::int64_t total_ = 0, held_out_ = 0, runs_ = 0;
};

}  // namespace ballast::data
