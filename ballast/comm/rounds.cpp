#include "ballast/comm/rounds.h"

#include <algorithm>
#include <sstream>

#include "ballast/base/error.h"

namespace ballast {

Rounds::Rounds(std::shared_ptr<Communicator> communicator, std::int64_t bits, std::function<std::string(int)> unit_name)
    : rank_(communicator->rank()),
      size_(communicator->size()),
      agreement_(std::move(communicator), bits),
      unit_name_(std::move(unit_name)) {}

void Rounds::meet_on_unit(Call call, int unit) {
  if (alone()) return;
  AgreementMessage message;
  message.unit = static_cast<std::uint32_t>(unit);
  meet(call, std::move(message), Likeness::kSameCounts);
}

std::vector<AgreementMessage> Rounds::meet(Call call, AgreementMessage message, Likeness likeness) {
  message.kind = static_cast<std::uint32_t>(call);
  message.window = counts_.window;
  message.backwards = counts_.backwards;
  message.micro_batches = counts_.micro_batches;
  if (alone()) return {std::move(message)};

  const std::vector<AgreementMessage> all = agreement_.round(message, describe(message));
  const auto passes = [&](const AgreementMessage& m) {
    const Call c = static_cast<Call>(m.kind);
    return likeness == Likeness::kPassing && (c == Call::kBackward || c == Call::kCoalesce);
  };
  const auto waits = std::find_if_not(all.begin(), all.end(), passes);
  const bool together = std::all_of(all.begin(), all.end(), [&](const AgreementMessage& other) {
    if (other.window != message.window) return false;
    if (passes(other)) return true;
    return other.kind == waits->kind && other.unit == waits->unit &&
           (likeness != Likeness::kSameCounts || other.backwards == waits->backwards);
  });
  if (!together) diverged(all);
  return all;
}

std::vector<std::vector<double>> Rounds::exchange(const std::vector<double>& values) {
  if (alone()) return {values};
  return agreement_.exchange(values);
}

void Rounds::diverged(const std::vector<AgreementMessage>& messages) const {
  std::ostringstream text;
  for (std::size_t r = 0; r < messages.size(); ++r)
    text << (r == 0 ? "" : ", ") << "rank " << r << ": " << describe(messages[r]);
  throw CommError("comm.meet", "ranks diverged in round ", messages.front().sequence, " (", text.str(),
                  "; this is rank ", rank(), ")");
}

std::string Rounds::describe(const AgreementMessage& message) const {
  std::ostringstream text;
  const auto unit = [&] { return "unit " + unit_name_(static_cast<int>(message.unit)); };
  const auto after = [&] { text << " after " << message.backwards << " backwards"; };
  switch (static_cast<Call>(message.kind)) {
    case Call::kGather:
      text << "gather of " << unit();
      after();
      break;
    case Call::kBackward:
      text << "end of backward() number " << message.backwards;
      break;
    case Call::kStep:
      text << "step()";
      after();
      break;
    case Call::kAccess:
      text << "access to full values in " << unit();
      after();
      break;
    case Call::kGathered:
      text << "gathered()";
      after();
      break;
    case Call::kCoalesce:
      text << "end of coalesce_grad_reduction()";
      after();
      break;
    case Call::kZeroGrad:
      text << "zero_grad()";
      after();
      break;
    case Call::kMoveStates:
      text << "offload_states() or reload_states()";
      after();
      break;
    case Call::kCheckpoint:
      text << "save_checkpoint() or load_checkpoint()";
      after();
      break;
  }
  text << " in window " << message.window;
  return text.str();
}

}  // namespace ballast
