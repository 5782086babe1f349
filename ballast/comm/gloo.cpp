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

/// Point-to-point transfers with single peers; done when all of them are.
class GlooFlight final : public Flight {
 public:
  void send(c10d::Backend& backend, const at::Tensor& bytes, int peer, int tag) {
    std::vector<at::Tensor> tensors{bytes};
    sends_.emplace_back(peer, named(peer, [&] { return backend.send(tensors, peer, tag); }));
  }

  void receive(c10d::Backend& backend, const at::Tensor& bytes, int peer, int tag) {
    std::vector<at::Tensor> tensors{bytes};
    receives_.emplace_back(peer, named(peer, [&] { return backend.recv(tensors, peer, tag); }));
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
        named(peer, [&, &work = work] {  // zero would mean no limit
          return work->wait(std::max(left, std::chrono::milliseconds(1)));
        });
      }
    }
    if (device_.defined()) device_.copy_(host_);
  }

  bool blocks_host() const noexcept override { return true; }

 private:
  /// Runs `call`; an error from it names the peer.
  template <class Call>
  static auto named(int peer, Call&& call) -> decltype(call()) {
    try {
      return call();
    } catch (const c10::Error& error) {
      throw std::runtime_error("peer rank " + std::to_string(peer) + ": " + trim(error.what_without_backtrace()));
    } catch (const std::exception& error) {
      throw std::runtime_error("peer rank " + std::to_string(peer) + ": " + trim(error.what()));
    }
  }

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
    auto flight = std::make_unique<GlooFlight>();
    const at::Tensor host = rank() == root ? to_host(data) : host_buffer(data);
    if (rank() != root) {
      flight->receive(*backend_, host, root, tag(sequence));
      if (!data.is_cpu()) flight->deliver(data, host);
    } else {
      for (int step = 1; step < size(); ++step) flight->send(*backend_, host, (root + step) % size(), tag(sequence));
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
    auto flight = std::make_unique<GlooFlight>();
    for (int step = 1; step < size(); ++step) {  // receives first: a sender's data then has a place to go
      const int peer = (rank() + size() - step) % size();
      flight->receive(*backend_, into(peer), peer, tag(sequence));
    }
    for (int step = 1; step < size(); ++step) {  // each rank starts with its own neighbour: no rush on rank 0
      const int peer = (rank() + step) % size();
      flight->send(*backend_, from(peer), peer, tag(sequence));
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
