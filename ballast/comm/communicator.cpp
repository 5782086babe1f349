#include "ballast/comm/communicator.h"

#include <ATen/ATen.h>

#include <sstream>

#include "ballast/base/bytes.h"
#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/comm/communicator_shared.h"

namespace ballast {
namespace {

/// The tensor's memory as one-dimensional bytes; no copy, and no trace in autograd.
at::Tensor bytes_of(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return tensor.detach().view({-1}).view(at::kByte);
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* from_a = static_cast<const std::byte*>(a.const_data_ptr());
  const auto* from_b = static_cast<const std::byte*>(b.const_data_ptr());
  return from_a < from_b + b.nbytes() && from_b < from_a + a.nbytes();
}

void check_tensor(const char* operation, const char* name, const at::Tensor& tensor, c10::Device device,
                  const std::string& what) {
  if (!tensor.defined()) throw UseError(operation, name, " is an undefined tensor (", what, ")");
  if (tensor.device() != device) {
    throw UseError(operation, name, " is on another device than the communicator (got ", tensor.device().str(),
                   ", want ", device.str(), "; ", what, ")");
  }
  if (!tensor.is_contiguous()) {
    throw UseError(operation, name, " is not contiguous (sizes ", tensor.sizes(), ", strides ", tensor.strides(), "; ",
                   what, ")");
  }
}

void check_pair(const char* operation, const at::Tensor& out, const at::Tensor& in, c10::Device device,
                const std::string& what) {
  check_tensor(operation, "out", out, device, what);
  check_tensor(operation, "in", in, device, what);
  check_eq<UseError>(operation, "out and in differ in dtype", c10::toString(out.scalar_type()),
                     std::string(c10::toString(in.scalar_type())), "; ", what);
}

}  // namespace

std::string cause_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch_error ? torch_error->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

// ---- Communicator::Shared ----

std::string Communicator::Shared::context() const {
  std::ostringstream out;
  out << "rank " << rank << " of " << size << ", communicator " << purpose;
  return out.str();
}

void Communicator::Shared::follow(std::uint64_t sequence, std::unique_ptr<Flight> flight) {
  std::lock_guard lock(mutex);
  if (!watch) {
    watch = std::make_unique<CollectiveWatch>(log, timeout, [this](std::uint64_t late, const std::string& cause) {
      // Told now: this rank's thread may hang in the device's driver until the backend ends the process.
      log_warning("[comm.watch] collective ", late, " failed: ", cause, " (", context(),
                  "; last collectives: ", log.text(), ")");
      std::lock_guard failed(mutex);
      if (failure.empty()) failure = "collective " + std::to_string(late) + " failed: " + cause;
    });
  }
  watch->follow(sequence, std::move(flight));
}

// ---- PendingCollective ----

struct PendingCollective::State {
  std::shared_ptr<Communicator::Shared> shared;
  std::unique_ptr<Flight> flight;
  const char* operation;
  std::string what;
  std::uint64_t sequence;
  std::int64_t bytes;
  std::array<at::Tensor, 2> tensors;  // kept alive until the flight has ended

  [[noreturn]] void fail(const std::exception& error) const {
    const std::string cause = cause_of(error);
    shared->log.ended(sequence, CollectiveLog::State::kFailed);
    CommError full(std::string("comm.") + operation, what, " failed: ", cause, " (collective ", sequence, ", ",
                   format_bytes(bytes), ", ", shared->context(), "; last collectives: ", shared->log.text(), ")");
    std::lock_guard lock(shared->mutex);
    if (shared->failure.empty()) shared->failure = what + " failed: " + cause;
    throw full;
  }
};

PendingCollective::PendingCollective() noexcept = default;
PendingCollective::PendingCollective(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
PendingCollective::PendingCollective(PendingCollective&&) noexcept = default;
PendingCollective& PendingCollective::operator=(PendingCollective from) noexcept {
  std::swap(state_, from.state_);
  return *this;
}

PendingCollective::~PendingCollective() {
  try {
    wait();
  } catch (const std::exception&) {
    // The communicator keeps the failure; its next launch reports it.
  }
}

bool PendingCollective::pending() const noexcept { return state_ != nullptr; }
bool PendingCollective::blocks_host() const noexcept { return state_ && state_->flight->blocks_host(); }

void PendingCollective::wait() {
  if (!state_) return;
  const std::unique_ptr<State> state = std::move(state_);  // waited for once, whether it throws or not
  try {
    state->flight->wait(state->shared->timeout);
  } catch (const std::exception& error) {
    state->fail(error);
  }
  if (state->flight->blocks_host()) {
    state->shared->log.ended(state->sequence, CollectiveLog::State::kDone);
  } else {
    state->shared->follow(state->sequence, std::move(state->flight));
  }
}

// ---- Communicator ----

Communicator::Communicator(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
Communicator::~Communicator() = default;
int Communicator::rank() const noexcept { return shared_->rank; }
int Communicator::size() const noexcept { return shared_->size; }
const std::string& Communicator::purpose() const noexcept { return shared_->purpose; }

template <class Start>
PendingCollective Communicator::launch(const char* operation, const std::string& what,
                                       std::array<at::Tensor, 2> tensors, Start&& start) {
  {
    std::lock_guard lock(shared_->mutex);
    if (!shared_->failure.empty()) {
      throw CommError(std::string("comm.") + operation, what, " refused: an earlier collective on this communicator, ",
                      shared_->failure, " (", shared_->context(), ")");
    }
  }
  const std::int64_t bytes = static_cast<std::int64_t>(tensors[0].nbytes());
  auto state = std::make_unique<PendingCollective::State>();
  state->shared = shared_;
  state->operation = operation;
  state->what = what;
  state->bytes = bytes;
  state->tensors = std::move(tensors);
  state->sequence = shared_->log.launched(operation, what, bytes);
  try {
    state->flight = start(*shared_->transport, state->sequence);
  } catch (const std::exception& error) {
    state->fail(error);
  }
  return PendingCollective(std::move(state));
}

PendingCollective Communicator::all_gather(const at::Tensor& out, const at::Tensor& in, const std::string& what) {
  constexpr const char* kOperation = "comm.all_gather";
  check_pair(kOperation, out, in, shared_->device, what);
  check_eq<UseError>(kOperation, "out must hold every rank's in", out.numel(), shared_->size * in.numel(),
                     "elements: ", shared_->size, " ranks of ", in.numel(), "; ", what);
  if (in.numel() == 0) return {};
  const at::Tensor to = bytes_of(out), from = bytes_of(in);
  const at::Tensor slice = to.narrow(0, shared_->rank * from.numel(), from.numel());
  if (slice.const_data_ptr() != from.const_data_ptr()) {
    if (overlap(to, from)) {
      throw UseError(kOperation, "in overlaps out but is not its slice at this rank (rank ", shared_->rank, ", ", what,
                     ")");
    }
    slice.copy_(from, /*non_blocking=*/true);
  }
  if (shared_->size == 1) return {};
  return launch("all_gather", what, {to, slice}, [&](Transport& transport, std::uint64_t sequence) {
    return transport.all_gather(to, slice, sequence);
  });
}

PendingCollective Communicator::all_to_all(const at::Tensor& out, const at::Tensor& in, const std::string& what) {
  constexpr const char* kOperation = "comm.all_to_all";
  check_pair(kOperation, out, in, shared_->device, what);
  check_eq<UseError>(kOperation, "out and in differ in size", out.numel(), in.numel(), "elements; ", what);
  check_eq<UseError>(kOperation, "elements don't divide by the ranks", in.numel() % shared_->size, 0, "left of ",
                     in.numel(), " over ", shared_->size, " ranks; ", what);
  if (in.numel() == 0) return {};
  const at::Tensor to = bytes_of(out), from = bytes_of(in);
  if (overlap(to, from)) throw UseError(kOperation, "in and out overlap (rank ", shared_->rank, ", ", what, ")");
  if (shared_->size == 1) {
    to.copy_(from, /*non_blocking=*/true);
    return {};
  }
  return launch("all_to_all", what, {to, from},
                [&](Transport& transport, std::uint64_t sequence) { return transport.all_to_all(to, from, sequence); });
}

PendingCollective Communicator::broadcast(const at::Tensor& data, int root, const std::string& what) {
  constexpr const char* kOperation = "comm.broadcast";
  check_tensor(kOperation, "data", data, shared_->device, what);
  if (root < 0 || root >= shared_->size) {
    throw UseError(kOperation, "no such root (root ", root, ", ", shared_->size, " ranks; ", what, ")");
  }
  if (data.numel() == 0 || shared_->size == 1) return {};
  const at::Tensor bytes = bytes_of(data);
  return launch("broadcast", what, {bytes, at::Tensor()}, [&](Transport& transport, std::uint64_t sequence) {
    return transport.broadcast(bytes, root, sequence);
  });
}

}  // namespace ballast
