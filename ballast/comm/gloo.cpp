#include "ballast/comm/gloo.h"

// The wheel's Gloo backend is compiled in; its header is only live behind this switch.
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <ATen/ATen.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>
#include <vector>

namespace ballast {
namespace {

using Clock = std::chrono::steady_clock;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Gloo writes to its sockets without MSG_NOSIGNAL, so that a peer's death would end this process by SIGPIPE instead of
/// an error. While this lives the calling thread, and every thread that it starts, holds the signal back; one that came
/// meanwhile is taken. The process's own handling of SIGPIPE stays as it is.
class SigpipeHeld {
 public:
  SigpipeHeld() noexcept {
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  ~SigpipeHeld() {
    sigset_t pending;
    if (!was_pending_ && sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE) == 1) {
      constexpr timespec kNoWait{};
      sigtimedwait(&sigpipe_, nullptr, &kNoWait);
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SigpipeHeld(const SigpipeHeld&) = delete;
  SigpipeHeld& operator=(const SigpipeHeld&) = delete;

 private:
  sigset_t sigpipe_, before_;
  bool was_pending_;
};

/// Gloo's text without the file and line in front and its advice behind.
std::string trim(std::string text) {
  if (text.rfind("[/", 0) == 0) text.erase(0, std::min(text.find("] "), text.size() - 2) + 2);
  text.erase(std::min(text.find(". This is typically caused"), text.size()));
  return text;
}

std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return trim(torch_error ? torch_error->what_without_backtrace() : error.what());
}

/// Point-to-point transfers with single peers; done when all of them are.
class GlooFlight final : public Flight {
 public:
  explicit GlooFlight(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  void send(const at::Tensor& bytes, int peer, int tag) {
    std::vector<at::Tensor> tensors{bytes};
    try {
      sends_.emplace_back(peer, backend_->send(tensors, peer, tag));
    } catch (const std::exception& error) {
      fail(peer, error);
    }
  }

  void receive(const at::Tensor& bytes, int peer, int tag) {
    try {
      receives_.emplace_back(peer, start_receive(bytes, peer, tag));
    } catch (const std::exception& error) {
      fail(peer, error);
    }
  }

  /// What has been received in `host` belongs into `device`: copied on wait(), on the waiter's stream.
  void deliver(const at::Tensor& device, const at::Tensor& host) {
    device_ = device;
    host_ = host;
  }

  void wait(std::chrono::milliseconds timeout) override {
    const auto deadline = Clock::now() + timeout;
    for (auto* works : {&receives_, &sends_}) {
      for (auto& [peer, work] : *works) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
        try {
          work->wait(std::max(left, std::chrono::milliseconds(1)));  // zero would mean no limit
        } catch (const std::exception& error) {
          // A timeout made Gloo close all connections itself: the others say nothing any more.
          if (Clock::now() >= deadline) throw std::runtime_error(line(peer, error));
          fail(peer, error);
        }
      }
    }
    if (device_.defined()) device_.copy_(host_);
  }

  bool blocks_host() const noexcept override { return true; }

 private:
  WorkPtr start_receive(const at::Tensor& bytes, int peer, int tag) {
    std::vector<at::Tensor> tensors{bytes};
    return backend_->recv(tensors, peer, tag);
  }

  static std::string line(int peer, const std::exception& error) {
    std::ostringstream out;
    out << "peer rank " << peer << ": " << text_of(error);
    return out.str();
  }

  /// Names this peer, and every other one whose connection is broken too: a rank that dies ends the others one after
  /// the other, and the first to be missed need not be the first that died.
  [[noreturn]] void fail(int peer, const std::exception& error) {
    constexpr int kNoCollective = 0;
    const SigpipeHeld held;
    std::string text = line(peer, error);
    const at::Tensor nothing = at::empty({1}, at::kByte);
    for (int other = 0; other < backend_->getSize(); ++other) {
      if (other == peer || other == backend_->getRank()) continue;
      try {
        start_receive(nothing, other, kNoCollective);
      } catch (const std::exception& broken) {
        text += "; " + line(other, broken);
      }
    }
    throw std::runtime_error(text);
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::vector<std::pair<int, WorkPtr>> receives_, sends_;
  at::Tensor device_, host_;
};

/// Collectives as direct exchanges between pairs of ranks: nothing is copied besides the transfers (c10d's own
/// all_gather goes through a second buffer of the full size) and no worker thread stands between caller and socket.
class GlooTransport final : public Transport {
 public:
  GlooTransport(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  std::unique_ptr<Flight> all_gather(const at::Tensor& out, const at::Tensor& in, std::uint64_t sequence) override {
    const at::Tensor host_in = to_host(in), host_out = host_buffer(out);
    const std::int64_t length = in.numel();
    // The staged copy is delivered whole, this rank's own slice included.
    if (!out.is_cpu()) host_out.narrow(0, rank() * length, length).copy_(host_in);
    return exchange(
        out, host_out, sequence, [&](int) { return host_in; },
        [&](int peer) { return host_out.narrow(0, peer * length, length); });
  }

  std::unique_ptr<Flight> all_to_all(const at::Tensor& out, const at::Tensor& in, std::uint64_t sequence) override {
    const at::Tensor host_in = to_host(in), host_out = host_buffer(out);
    const std::int64_t length = in.numel() / size();
    host_out.narrow(0, rank() * length, length).copy_(host_in.narrow(0, rank() * length, length));
    return exchange(
        out, host_out, sequence, [&](int peer) { return host_in.narrow(0, peer * length, length); },
        [&](int peer) { return host_out.narrow(0, peer * length, length); });
  }

  std::unique_ptr<Flight> broadcast(const at::Tensor& data, int root, std::uint64_t sequence) override {
    const SigpipeHeld held;
    auto flight = std::make_unique<GlooFlight>(backend_);
    const at::Tensor host = rank() == root ? to_host(data) : host_buffer(data);
    if (rank() != root) {
      flight->receive(host, root, tag(sequence));
      if (!data.is_cpu()) flight->deliver(data, host);
    } else {
      for (int step = 1; step < size(); ++step) flight->send(host, (root + step) % size(), tag(sequence));
    }
    return flight;
  }

 private:
  int rank() const { return backend_->getRank(); }
  int size() const { return backend_->getSize(); }
  /// Transfers of one collective find each other by it.
  static int tag(std::uint64_t sequence) { return static_cast<int>(sequence & 0x7fffffff); }
  static at::Tensor to_host(const at::Tensor& bytes) { return bytes.is_cpu() ? bytes : bytes.cpu(); }
  static at::Tensor host_buffer(const at::Tensor& bytes) {
    return bytes.is_cpu() ? bytes : at::empty(bytes.sizes(), bytes.options().device(at::kCPU));
  }

  /// Sends from(peer) to, and receives into(peer) from, every other rank.
  template <class From, class Into>
  std::unique_ptr<Flight> exchange(const at::Tensor& out, const at::Tensor& host_out, std::uint64_t sequence,
                                   From&& from, Into&& into) {
    const SigpipeHeld held;
    auto flight = std::make_unique<GlooFlight>(backend_);
    for (int step = 1; step < size(); ++step) {  // receives first: a sender's data then has a place to go
      const int peer = (rank() + size() - step) % size();
      flight->receive(into(peer), peer, tag(sequence));
    }
    for (int step = 1; step < size(); ++step) {  // each rank starts with its own neighbour: no rush on rank 0
      const int peer = (rank() + step) % size();
      flight->send(from(peer), peer, tag(sequence));
    }
    if (!out.is_cpu()) flight->deliver(out, host_out);
    return flight;
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace

std::unique_ptr<Transport> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                     std::chrono::milliseconds timeout, bool loopback) {
  using Group = c10d::ProcessGroupGloo;
  const SigpipeHeld held;  // the backend's threads inherit it
  auto options = Group::Options::create(timeout);
  options->threads = 1;  // sends and receives bypass the workers
  if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"); interface && *interface) {
    options->devices.push_back(Group::createDeviceForInterface(interface));
  } else if (loopback) {
    options->devices.push_back(Group::createDeviceForHostname("127.0.0.1"));
  } else {
    options->devices.push_back(Group::createDefaultDevice());
  }
  return std::make_unique<GlooTransport>(c10::make_intrusive<Group>(store, rank, size, options));
}

}  // namespace ballast
