#include "ballast/comm/agreement.h"

#include <ATen/ATen.h>

#include <cstring>
#include <sstream>

#include "ballast/base/error.h"
#include "ballast/base/math.h"

namespace ballast {
namespace {

/// A message on the wire, followed by the bitmap's words. Fixed widths and no padding: ranks run the same program.
struct Wire {
  std::uint32_t kind, unit;
  std::uint64_t sequence;
  std::int64_t backwards, micro_batches, window;
  double weight;
  std::uint64_t flags;
};
static_assert(sizeof(Wire) == 56);

}  // namespace

Agreement::Agreement(std::shared_ptr<Communicator> communicator, std::int64_t bits)
    : communicator_(std::move(communicator)),
      words_(ceil_div(bits, 64)),
      message_bytes_(static_cast<std::int64_t>(sizeof(Wire)) + 8 * words_),
      all_(at::empty({communicator_->size() * message_bytes_}, at::kByte)) {}

at::Tensor Agreement::slice_of_this_rank(const at::Tensor& all) const {
  const std::int64_t length = all.numel() / communicator_->size();
  return all.narrow(0, communicator_->rank() * length, length);
}

std::vector<AgreementMessage> Agreement::round(const AgreementMessage& message, const std::string& what) {
  const std::int64_t given = static_cast<std::int64_t>(message.bits.size());
  if (given != 0 && given != words_) {
    throw UseError("comm.agree", "bitmap of another length (got ", given, ", want ", words_, " words)");
  }
  const int size = communicator_->size();
  ++sequence_;
  std::vector<AgreementMessage> messages(size, message);
  if (size == 1) {
    messages[0].sequence = sequence_;
    messages[0].bits.resize(words_);
    return messages;
  }

  auto* const bytes = static_cast<std::uint8_t*>(all_.mutable_data_ptr());
  const Wire mine{message.kind,          message.unit,   sequence_,      message.backwards,
                  message.micro_batches, message.window, message.weight, message.flags};
  std::uint8_t* const slot = bytes + communicator_->rank() * message_bytes_;
  std::memcpy(slot, &mine, sizeof mine);
  std::memset(slot + sizeof mine, 0, 8 * words_);
  if (given) std::memcpy(slot + sizeof mine, message.bits.data(), 8 * words_);
  communicator_->all_gather(all_, slice_of_this_rank(all_), what).wait();

  bool together = true;
  for (int rank = 0; rank < size; ++rank) {
    const std::uint8_t* const from = bytes + rank * message_bytes_;
    Wire wire;
    std::memcpy(&wire, from, sizeof wire);
    AgreementMessage& to = messages[rank];
    to.kind = wire.kind;
    to.unit = wire.unit;
    to.sequence = wire.sequence;
    to.backwards = wire.backwards;
    to.micro_batches = wire.micro_batches;
    to.window = wire.window;
    to.weight = wire.weight;
    to.flags = wire.flags;
    to.bits.resize(words_);
    std::memcpy(to.bits.data(), from + sizeof wire, 8 * words_);
    together = together && wire.sequence == sequence_;
  }
  if (!together) {
    std::ostringstream rounds;
    for (int rank = 0; rank < size; ++rank) {
      rounds << (rank ? ", " : "") << "rank " << rank << ": round " << messages[rank].sequence << " kind "
             << messages[rank].kind;
    }
    throw CommError("comm.agree", "ranks are in different rounds (", rounds.str(), ")");
  }
  return messages;
}

std::vector<std::vector<double>> Agreement::exchange(const std::vector<double>& values, const std::string& what) {
  const int size = communicator_->size();
  if (size == 1) return {values};
  const std::int64_t length = static_cast<std::int64_t>(values.size());
  if (!values_.defined() || values_.numel() < size * length) values_ = at::empty({size * length}, at::kDouble);
  const at::Tensor all = values_.narrow(0, 0, size * length);
  auto* const numbers = all.mutable_data_ptr<double>();
  std::copy(values.begin(), values.end(), numbers + communicator_->rank() * length);
  communicator_->all_gather(all, slice_of_this_rank(all), what).wait();
  std::vector<std::vector<double>> result;
  for (int rank = 0; rank < size; ++rank) result.emplace_back(numbers + rank * length, numbers + (rank + 1) * length);
  return result;
}

}  // namespace ballast
