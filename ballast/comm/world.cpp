#include "ballast/comm/world.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/comm/communicator.h"
#include "ballast/comm/communicator_shared.h"
#include "ballast/comm/gloo.h"
#include "ballast/comm/launch_env.h"
#include "ballast/comm/nccl.h"
#include "ballast/comm/threads.h"
#include "ballast/comm/world_state.h"

namespace ballast {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

int cuda_devices() {
  return c10::impl::hasDeviceGuardImpl(c10::kCUDA) ? c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount() : 0;
}

c10::Device choose_device(const WorldOptions& options, int local_rank) {
  constexpr const char* kOperation = "comm.device";
  constexpr const char* kRemedy = "build it again with a CUDA build of PyTorch and a CUDA toolkit";
  const int devices = cuda_devices();
  if (options.device == "cpu" || (options.device == "auto" && devices == 0)) return c10::kCPU;
  if (options.device == "auto" && !nccl_available()) {  // Python brings a LibTorch with CUDA to any build
    if (local_rank == 0)
      log_warning("no GPU is used: this build has no CUDA (GPUs visible ", devices, "; ", kRemedy, ")");
    return c10::kCPU;
  }
  c10::Device device(c10::kCUDA);
  if (options.device != "auto") {
    try {
      device = c10::Device(options.device);
    } catch (const c10::Error&) {
      throw UseError(kOperation, "not a device (device = ", options.device, "; allowed: auto, cpu, cuda, cuda:N)");
    }
  }
  if (!device.is_cuda()) {
    throw UseError(kOperation, "no such kind of device (device = ", options.device,
                   "; allowed: auto, cpu, cuda, cuda:N)");
  }
  if (devices > 0 && !nccl_available())
    throw UseError(kOperation, "this build has no CUDA (device = ", options.device, ", GPUs visible ", devices, "; ",
                   kRemedy, ", or use device cpu)");
  if (!device.has_index()) {
    const bool share = options.backend == "gloo" && devices > 0;  // NCCL refuses two ranks on one GPU
    device.set_index(static_cast<c10::DeviceIndex>(share ? local_rank % devices : local_rank));
  }
  if (device.index() >= devices) {
    throw UseError(kOperation, "no such GPU (device = ", options.device, ", local rank ", local_rank, ", GPUs visible ",
                   devices, "); start fewer ranks on this machine, or use device cpu");
  }
  return device;
}

void check_backend(const WorldOptions& options, c10::Device device) {
  const std::string& backend = options.backend;
  if (backend != "auto" && backend != "gloo" && backend != "nccl" && backend != "threads") {
    throw UseError("comm.backend", "not a backend (backend = ", backend, "; allowed: auto, gloo, nccl, threads)");
  }
  if (backend == "nccl" && !device.is_cuda()) {
    throw UseError("comm.backend", "nccl needs a CUDA device (backend = nccl, device ", device.str(), ")");
  }
}

/// Waits until every rank has come to the rendezvous; the error says who has not.
void join(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout) {
  std::vector<std::string> keys;
  for (int peer = 0; peer < size; ++peer) keys.push_back("joined/" + std::to_string(peer));
  store.set(keys[rank], std::vector<std::uint8_t>{1});
  try {
    store.wait(keys, timeout);
  } catch (const std::exception& error) {
    std::ostringstream missing;
    try {
      for (int peer = 0; peer < size; ++peer) {
        if (!store.check({keys[peer]})) missing << ' ' << peer;
      }
    } catch (const std::exception&) {
      missing << " unknown, since the rendezvous itself is gone";
    }
    throw CommError("comm.join", "not all ranks came to the rendezvous (missing:", missing.str(), "; rank ", rank,
                    " of ", size, ", timeout ", timeout.count(), " ms, ", cause_of(error), ")");
  }
}

// A rendezvous that this process serves ends with the process. A peer may come for the next world before this rank has
// let the last one go: it would be counted by a server that ends with that one, and then missed by the next.
void serve_until_the_end(std::uint16_t port, const StorePtr& store) {
  static std::mutex mutex;
  static auto* const served = new std::map<std::uint16_t, StorePtr>;  // not destroyed: its thread runs until the end
  const std::lock_guard lock(mutex);
  served->try_emplace(port, store);
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.compare(0, 4, "127.") == 0;
}

}  // namespace

std::shared_ptr<World::State> World::make_state(StorePtr store, int rank, int size, int local_rank, bool loopback,
                                                const WorldOptions& options) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw UseError("comm.world", "no such rank (rank ", rank, ", size ", size, ")");
  }
  const c10::Device device = choose_device(options, local_rank);
  check_backend(options, device);
  if (options.backend == "threads" && size > 1 && dynamic_cast<const c10d::HashStore*>(store.get()) == nullptr) {
    throw UseError("comm.backend", "threads needs all ranks in this process (a HashStore for from_store; rank ", rank,
                   " of ", size, ")");
  }
  auto state = std::make_shared<State>(rank, size, device, options, loopback);
  if (size == 1) return state;
  try {
    // Worlds over one store count themselves, each rank for itself: they are made in the same order everywhere.
    const auto number = store->add("ballast/worlds/" + std::to_string(rank), 1);
    state->store = c10::make_intrusive<c10d::PrefixStore>("ballast/world" + std::to_string(number), std::move(store));
    join(*state->store, rank, size, options.timeout);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CommError("comm.world", "the rendezvous failed: ", cause_of(error), " (rank ", rank, " of ", size, ")");
  }
  return state;
}

World::World(std::shared_ptr<State> state) : state_(std::move(state)) {}

World World::single(const WorldOptions& options) { return World(make_state({}, 0, 1, 0, true, options)); }

World World::from_store(StorePtr store, int rank, int size, const WorldOptions& options) {
  if (!store && size > 1) throw UseError("comm.from_store", "no store (rank ", rank, " of ", size, ")");
  const bool one_process = dynamic_cast<const c10d::HashStore*>(store.get()) != nullptr;
  return World(make_state(std::move(store), rank, size, rank, one_process, options));
}

World World::from_env(const WorldOptions& options) {
  const auto launch = read_launch_env(process_env);
  if (!launch) return single(options);
  if (launch->size == 1) return World(make_state({}, 0, 1, launch->local_rank, true, options));
  StorePtr store;
  try {
    c10d::TCPStoreOptions store_options;
    store_options.port = launch->port;
    store_options.isServer = launch->rank == 0 && !launch->store_is_served;
    store_options.waitWorkers = false;  // join() waits, and names who is missing
    store_options.timeout = options.timeout;
    store_options.multiTenant = true;  // a second world in this process meets on the same port
    store = c10::make_intrusive<c10d::TCPStore>(launch->host, store_options);
    if (store_options.isServer) serve_until_the_end(launch->port, store);
  } catch (const std::exception& error) {
    throw CommError("comm.from_env", launch->rank == 0 && !launch->store_is_served ? "can't serve" : "can't reach",
                    " the rendezvous at ", launch->host, ":", launch->port, ": ", cause_of(error), " (rank ",
                    launch->rank, " of ", launch->size, ", launcher ", launch->launcher,
                    "); check MASTER_ADDR and MASTER_PORT");
  }
  store = c10::make_intrusive<c10d::PrefixStore>("attempt" + launch->attempt, std::move(store));
  return World(
      make_state(std::move(store), launch->rank, launch->size, launch->local_rank, is_loopback(launch->host), options));
}

int World::rank() const { return state_->rank; }
int World::size() const { return state_->size; }
c10::Device World::device() const { return state_->device; }
std::chrono::milliseconds World::timeout() const { return state_->options.timeout; }

std::shared_ptr<Communicator> World::communicator(const std::string& purpose, c10::Device device,
                                                  std::chrono::milliseconds shorter) const {
  const std::chrono::milliseconds timeout = std::min(World::timeout(), shorter);
  auto shared = std::make_shared<Communicator::Shared>();
  shared->rank = rank();
  shared->size = size();
  shared->purpose = purpose;
  shared->device = device;
  shared->timeout = timeout;
  if (state_->size > 1) {
    const auto number = state_->communicators.fetch_add(1);
    auto store = c10::make_intrusive<c10d::PrefixStore>(std::to_string(number) + "/" + purpose, state_->store);
    const bool threads = state_->options.backend == "threads" && device.is_cpu();
    const bool nccl = device.is_cuda() && state_->options.backend != "gloo";
    try {
      shared->transport = threads ? make_threads(store, rank(), size())
                          : nccl  ? make_nccl(store, rank(), size(), device, timeout)
                                  : make_gloo(store, rank(), size(), timeout, state_->loopback);
      // Gloo connects each rank at its own pace: one that is done and leaves would break a peer's attempt.
      join(*store, rank(), size(), timeout);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw CommError("comm.communicator", "can't connect the ranks: ", cause_of(error), " (communicator ", purpose,
                      ", rank ", rank(), " of ", size(), ", backend ",
                      threads ? "threads"
                      : nccl  ? "nccl"
                              : "gloo",
                      ")");
    }
  }
  return std::shared_ptr<Communicator>(new Communicator(std::move(shared)));
}

}  // namespace ballast
