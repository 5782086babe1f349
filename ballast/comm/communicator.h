#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

namespace ballast {

/// A collective in flight. Move-only. wait() returns when the result may be used (on CUDA: by work that is queued on
/// the current stream from now on) and throws CommError, which names the collective, its unit, this rank and the last
/// collectives, when a peer failed or the timeout passed. The tensors are kept alive until then. A handle that dies
/// unwaited waits and swallows the error: only error paths do that.
class PendingCollective {
 public:
  PendingCollective() noexcept;
  PendingCollective(PendingCollective&&) noexcept;
  PendingCollective& operator=(PendingCollective) noexcept;  // by value: the old collective ends with this call
  ~PendingCollective();
  /// False once waited for, and where nothing had to travel (one rank, no bytes).
  bool pending() const noexcept;
  /// Would wait() hold up the calling thread until the peers have joined? (NCCL: no, only its stream's work.)
  bool blocks_host() const noexcept;
  void wait();

 private:
  friend class Communicator;
  struct State;
  explicit PendingCollective(std::unique_ptr<State> state) noexcept;
  std::unique_ptr<State> state_;
};

/// One ordered channel between all ranks. Ranks must launch the same collectives in the same order. All of them move
/// bytes and never do arithmetic, so every dtype works and results don't depend on the backend; sums are formed by the
/// caller in rank order. Tensors are contiguous and on the communicator's device. With one rank collectives are copies.
/// `what` says for whom ("unit blocks.3"): it appears in errors and in the ring of last collectives.
/// Throws UseError (shapes, dtypes, devices, aliasing) before anything travels, CommError when a peer failed; after a
/// CommError every later launch throws with the same cause. Made by World::communicator.
class Communicator {
 public:
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  int rank() const noexcept;
  int size() const noexcept;
  const std::string& purpose() const noexcept;

  /// out: [size * n], gets every rank's in ([n]) in rank order. in may be the slice of out at this rank.
  PendingCollective all_gather(const at::Tensor& out, const at::Tensor& in, const std::string& what);
  /// in: [size * n]; slice r goes to rank r. out: [size * n]; slice r comes from rank r. No aliasing.
  PendingCollective all_to_all(const at::Tensor& out, const at::Tensor& in, const std::string& what);
  /// root's values of data become everybody's.
  PendingCollective broadcast(const at::Tensor& data, int root, const std::string& what);

 private:
  friend class World;
  friend class PendingCollective;
  struct Shared;
  explicit Communicator(std::shared_ptr<Shared> shared);
  template <class Start>
  PendingCollective launch(const char* operation, const std::string& what, std::array<at::Tensor, 2> tensors,
                           Start&& start);
  std::shared_ptr<Shared> shared_;  // also held by collectives in flight
};

}  // namespace ballast
