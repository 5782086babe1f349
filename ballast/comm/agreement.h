#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"

namespace ballast {

/// What one rank says in a round. What the fields mean, and which differences between ranks are errors, is the
/// caller's business; every kind of call sends the same message, so that ranks in different calls still meet.
struct AgreementMessage {
  std::uint32_t kind = 0;
  std::uint32_t unit = 0;
  std::uint64_t sequence = 0;  // filled in by Agreement: 1, 2, ...
  std::int64_t backwards = 0;
  std::int64_t micro_batches = 0;
  std::int64_t window = 0;
  double weight = 0;
  std::uint64_t flags = 0;
  std::vector<std::uint64_t> bits;  // word i holds bits 64 * i ...; empty is all zeros

  bool bit(std::int64_t index) const { return (bits.at(index / 64) >> (index % 64)) & 1; }
};

/// Rounds in which every rank learns every rank's message. One communication each, none with one rank. One thread.
class Agreement {
 public:
  /// communicator: for CPU tensors, used by nothing else. bits: length of a message's bitmap, equal on all ranks.
  Agreement(std::shared_ptr<Communicator> communicator, std::int64_t bits);

  std::int64_t words() const noexcept { return words_; }

  /// All ranks' messages in rank order, their bitmaps words() long. Throws UseError (a bitmap of another length),
  /// CommError (a peer failed, or ranks are in different rounds). what: what this rank is doing, for errors.
  std::vector<AgreementMessage> round(const AgreementMessage& message, const std::string& what = "agreement");

  /// All ranks' values in rank order; the same number of values on every rank. Throws CommError.
  std::vector<std::vector<double>> exchange(const std::vector<double>& values, const std::string& what = "exchange");

 private:
  at::Tensor slice_of_this_rank(const at::Tensor& all) const;

  std::shared_ptr<Communicator> communicator_;
  std::int64_t words_;
  std::int64_t message_bytes_;
  at::Tensor all_;     // size messages; this rank writes its own slice, all_gather fills the others
  at::Tensor values_;  // the same for exchange(), grown to the longest yet
  std::uint64_t sequence_ = 0;
};

}  // namespace ballast
