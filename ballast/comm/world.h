#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>

namespace c10d {
class Store;
class ProcessGroup;
}  // namespace c10d

namespace ballast {

class Communicator;

/// Device a rank works on, how it reaches its peers and how long it waits for them.
struct WorldOptions {
  /// "auto": the CUDA device of the local rank where LibTorch and the machine have one, else "cpu". "cuda": that device
  /// or an error. "cuda:1": this one.
  std::string device = "auto";
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// What carries tensors on a CUDA device: "nccl", "gloo" (staged through host memory; lets several ranks share one
  /// GPU), "auto": NCCL. Tensors on the CPU travel by Gloo, with "threads" (all ranks in this process, as in most
  /// tests) through its memory.
  std::string backend = "auto";
};

/// This process (in tests: thread) among its peers: rank, size, device and the means to make communicators. A cheap
/// value; copies share the connections. Several worlds may live in one process, made by all ranks in the same order.
class World {
 public:
  /// From torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), or those of mpirun
  /// (OMPI_COMM_WORLD_*) or srun (SLURM_*); one rank where none are set. Collective. Throws CommError (a peer doesn't
  /// come, a port is taken), UseError (a bad variable, no such device).
  static World from_env(const WorldOptions& options = {});
  /// One rank, no connections.
  static World single(const WorldOptions& options = {});
  /// From a rendezvous that the caller owns; every rank passes a store over the same data. Collective. Errors as above.
  static World from_store(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const WorldOptions& options = {});
  /// Ranks and rendezvous of a process group that the caller has made; Ballast opens communicators of its own over its
  /// store. Collective. Errors as above.
  static World from_process_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                  const WorldOptions& options = {});

  int rank() const;
  int size() const;
  c10::Device device() const;
  std::chrono::milliseconds timeout() const;

  /// A communicator of its own (own connections, own order of calls) for tensors on this device. Collective. purpose
  /// names it in errors ("gather", "reduce", "agree"). timeout: of its collectives, where it is shorter than the
  /// world's. Throws CommError.
  std::shared_ptr<Communicator> communicator(
      const std::string& purpose, c10::Device device,
      std::chrono::milliseconds timeout = std::chrono::milliseconds::max()) const;

 private:
  struct State;
  explicit World(std::shared_ptr<State> state);
  static std::shared_ptr<State> make_state(c10::intrusive_ptr<c10d::Store> store, int rank, int size, int local_rank,
                                           bool loopback, const WorldOptions& options);
  std::shared_ptr<State> state_;
};

}  // namespace ballast
