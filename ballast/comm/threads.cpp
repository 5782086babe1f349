#include "ballast/comm/threads.h"

#include <ATen/ATen.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace ballast {
namespace {

/// Where the ranks of one communicator meet. A collective's messages stay until every rank has taken them.
class Hub {
 public:
  explicit Hub(int size) : size_(size), gone_(static_cast<std::size_t>(size), false) {}

  void post(std::uint64_t sequence, int rank, at::Tensor message) {
    std::lock_guard lock(mutex_);
    round(sequence).messages[static_cast<std::size_t>(rank)] = std::move(message);
    changed_.notify_all();  // wakes the peers that wait for this message
  }

  /// The message of `from`; waits for it.
  at::Tensor take(std::uint64_t sequence, int from, std::chrono::steady_clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    const auto index = static_cast<std::size_t>(from);
    const auto there = [&] { return round(sequence).messages[index].defined() || gone_[index]; };
    if (!changed_.wait_until(lock, deadline, there))
      throw std::runtime_error("peer rank " + std::to_string(from) + ": timed out");
    if (!round(sequence).messages[index].defined())
      throw std::runtime_error("peer rank " + std::to_string(from) + ": has left the communicator");
    return round(sequence).messages[index];
  }

  void finish(std::uint64_t sequence) {
    std::lock_guard lock(mutex_);
    if (++round(sequence).finished == size_) rounds_.erase(sequence);
  }

  void leave(int rank) {
    std::lock_guard lock(mutex_);
    gone_[static_cast<std::size_t>(rank)] = true;
    changed_.notify_all();  // whoever waits for this rank's next message gets an error instead
  }

 private:
  struct Round {
    std::vector<at::Tensor> messages;
    int finished = 0;
  };
  Round& round(std::uint64_t sequence) {  // under the lock
    Round& round = rounds_[sequence];
    round.messages.resize(static_cast<std::size_t>(size_));
    return round;
  }

  const int size_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::map<std::uint64_t, Round> rounds_;
  std::vector<bool> gone_;
};

/// A copy that no operator makes, so that nothing observes it.
at::Tensor copy_of(const at::Tensor& bytes) {
  at::Tensor copy = at::empty({bytes.numel()}, at::kByte);
  if (bytes.numel() > 0)
    std::memcpy(copy.mutable_data_ptr(), bytes.const_data_ptr(), static_cast<std::size_t>(bytes.numel()));
  return copy;
}

class ThreadFlight final : public Flight {
 public:
  struct Piece {
    int from;
    at::Tensor out;
    std::int64_t begin;  // of the piece in the peer's message
  };
  ThreadFlight(std::shared_ptr<Hub> hub, std::uint64_t sequence, std::vector<Piece> pieces)
      : hub_(std::move(hub)), sequence_(sequence), pieces_(std::move(pieces)) {}

  // An operator writes what came, as it does where a transport brings it through host memory to a GPU: whoever
  // observes operators meets it here, too.
  void wait(std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    for (const Piece& piece : pieces_) {
      const at::Tensor message = hub_->take(sequence_, piece.from, deadline);
      piece.out.copy_(message.narrow(0, piece.begin, piece.out.numel()));
    }
    hub_->finish(sequence_);
  }
  bool blocks_host() const noexcept override { return true; }

 private:
  std::shared_ptr<Hub> hub_;
  std::uint64_t sequence_;
  std::vector<Piece> pieces_;
};

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Hub> hub, int rank, int size) : hub_(std::move(hub)), rank_(rank), size_(size) {}
  ~ThreadTransport() override { hub_->leave(rank_); }

  std::unique_ptr<Flight> all_gather(const at::Tensor& out, const at::Tensor& in, std::uint64_t sequence) override {
    const std::int64_t length = in.numel();
    return exchange(in, sequence, [&](int peer) {
      return ThreadFlight::Piece{peer, out.narrow(0, peer * length, length), 0};
    });
  }
  std::unique_ptr<Flight> all_to_all(const at::Tensor& out, const at::Tensor& in, std::uint64_t sequence) override {
    const std::int64_t length = in.numel() / size_;
    return exchange(in, sequence, [&](int peer) {
      return ThreadFlight::Piece{peer, out.narrow(0, peer * length, length), rank_ * length};
    });
  }
  std::unique_ptr<Flight> broadcast(const at::Tensor& data, int root, std::uint64_t sequence) override {
    std::vector<ThreadFlight::Piece> pieces;
    if (rank_ == root) hub_->post(sequence, rank_, copy_of(data));
    if (rank_ != root) pieces.push_back({root, data, 0});
    return std::make_unique<ThreadFlight>(hub_, sequence, std::move(pieces));
  }

 private:
  /// A copy of `in` for the peers, so that the caller may write to it when its own wait() has returned.
  template <class PieceOf>
  std::unique_ptr<Flight> exchange(const at::Tensor& in, std::uint64_t sequence, PieceOf&& piece_of) {
    hub_->post(sequence, rank_, copy_of(in));
    std::vector<ThreadFlight::Piece> pieces;
    for (int peer = 0; peer < size_; ++peer) pieces.push_back(piece_of(peer));
    return std::make_unique<ThreadFlight>(hub_, sequence, std::move(pieces));
  }

  std::shared_ptr<Hub> hub_;
  int rank_, size_;
};

}  // namespace

std::unique_ptr<Transport> make_threads(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  // Rank 0 makes the hub and lends its pointer until every other rank has a share.
  std::shared_ptr<Hub> hub;
  std::vector<std::string> shares;
  for (int peer = 1; peer < size; ++peer) shares.push_back("shared/" + std::to_string(peer));
  if (rank == 0) {
    hub = std::make_shared<Hub>(size);
    const auto address = reinterpret_cast<std::uintptr_t>(&hub);
    std::vector<std::uint8_t> bytes(sizeof address);
    std::memcpy(bytes.data(), &address, sizeof address);
    store->set("hub", bytes);
    store->wait(shares);
  } else {
    const std::vector<std::uint8_t> bytes = store->get("hub");
    std::uintptr_t address = 0;
    std::memcpy(&address, bytes.data(), sizeof address);
    hub = *reinterpret_cast<const std::shared_ptr<Hub>*>(address);
    store->set(shares[static_cast<std::size_t>(rank - 1)], std::vector<std::uint8_t>{1});
  }
  return std::make_unique<ThreadTransport>(std::move(hub), rank, size);
}

}  // namespace ballast
