#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ballast/comm/agreement.h"

namespace ballast {

/// The kinds of call in which ranks meet.
enum class Call : std::uint32_t {
  kGather,      // a parameter fault; unit says which
  kBackward,    // the end of a backward
  kStep,        // step(), at its entry
  kAccess,      // full values of one parameter, read or written; unit says which
  kGathered,    // gathered(...), at its begin and end
  kCoalesce,    // the end of coalesce_grad_reduction()
  kZeroGrad,    // zero_grad(), where backwards reduce
  kMoveStates,  // offload_states(), reload_states()
  kCheckpoint,  // save_checkpoint(), load_checkpoint()
};

/// What this rank counts, put into every message, so that a difference is found and can be told.
struct RankCounts {
  std::int64_t window = 0;         // windows ended or dropped
  std::int64_t backwards = 0;      // in this window
  std::int64_t micro_batches = 0;  // in this window, managed mode
};

/// Meetings of all ranks over an Agreement. Each meeting compares the kind of call, its unit and the number of the
/// window; ranks that diverged throw the same CommError, which tells what each of them was doing.
///   [comm.meet] ranks diverged in round 41 (rank 0: step() after 3 backwards, rank 1: backward() number 4)
class Rounds {
 public:
  /// communicator: CPU, used by nothing else. bits: length of the messages' bitmaps. unit_name: for error texts.
  Rounds(std::shared_ptr<Communicator> communicator, std::int64_t bits, std::function<std::string(int)> unit_name);

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool alone() const { return size() == 1; }

  /// The counts that the following messages carry.
  RankCounts& counts() { return counts_; }

  /// Every rank makes the same call on the same unit, or CommError.
  void meet_on_unit(Call call, int unit);
  /// How alike the ranks of a meeting must be. The same on all ranks.
  enum class Likeness : std::uint8_t {
    kSameCounts,  // the same call after as many backwards
    kSameCall,    // whatever the number of backwards
    kPassing,     // some may still pass through kBackward or kCoalesce while the others wait in one call, the same for
                  // all that wait: those repeat the meeting until all have come
  };
  /// The messages of all ranks, in rank order, or CommError.
  std::vector<AgreementMessage> meet(Call call, AgreementMessage message, Likeness likeness);
  /// As Agreement::exchange.
  std::vector<std::vector<double>> exchange(const std::vector<double>& values);

 private:
  [[noreturn]] void diverged(const std::vector<AgreementMessage>& messages) const;
  std::string describe(const AgreementMessage& message) const;

  int rank_, size_;
  Agreement agreement_;
  std::function<std::string(int)> unit_name_;
  RankCounts counts_;
};

}  // namespace ballast
