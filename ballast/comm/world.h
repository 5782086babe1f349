#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
class ProcessGroup;
}  // namespace c10d

namespace ballast {

class Communicator;

/// Device a rank works on and how long it waits for its peers.
struct WorldOptions {
  /// "auto": the CUDA device of the local rank where LibTorch and the machine have one, else "cpu".
  std::string device = "auto";
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

/// This process (in tests: thread) among its peers: rank, size, device and the means to make communicators. A cheap
/// value; copies share the connections.
class World {
 public:
  /// From torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), or those of mpirun (OMPI_COMM_WORLD_*) or Slurm (SLURM_PROCID ...); one
  /// rank where none are set. Collective. Throws CommError (a peer doesn't come, a port is taken), UseError (a bad variable).
  static World from_env(const WorldOptions& options = {});
  /// One rank, no connections.
  static World single(const WorldOptions& options = {});
  /// From a rendezvous that the caller owns; every rank passes a store over the same data. Collective.
  static World from_store(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const WorldOptions& options = {});
  /// Ranks and rendezvous of a process group that the caller has made; Ballast opens communicators of its own over its store.
  static World from_process_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const WorldOptions& options = {});

  int rank() const;
  int size() const;
  c10::Device device() const;
  std::chrono::milliseconds timeout() const;

  /// A communicator of its own (own connections, own order of calls) for tensors on this device. Collective. purpose
  /// names it in errors ("gather", "reduce", "agree").
  std::shared_ptr<Communicator> communicator(const std::string& purpose, c10::Device device) const;

 private:
  struct State;
  explicit World(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

}  // namespace ballast
