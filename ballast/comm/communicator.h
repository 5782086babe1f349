#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

namespace ballast {

/// A collective in flight. Move-only. wait() returns when the result may be used (on CUDA: by work that is queued on the
/// current stream from now on) and throws CommError, which names the collective, its unit, this rank and the last
/// collectives, when a peer failed or the timeout passed. The tensors are kept alive until then. A handle that dies
/// unwaited waits and swallows the error: only error paths do that.
class PendingCollective {
 public:
  PendingCollective() = default;
  PendingCollective(PendingCollective&&) noexcept;
  PendingCollective& operator=(PendingCollective&&) noexcept;
  ~PendingCollective();
  bool pending() const noexcept;
  void wait();

 private:
  friend class Communicator;
  struct State;
  explicit PendingCollective(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// One ordered channel between all ranks. Ranks must launch the same collectives in the same order. All of them move
/// bytes and never do arithmetic, so results don't depend on the backend; sums are formed by the caller in rank order.
/// `what` says for whom ("unit blocks.3"): it appears in errors and in the ring of last collectives.
class Communicator {
 public:
  virtual ~Communicator() = default;
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

  /// out: [size * n] contiguous, gets every rank's in ([n]) in rank order. in may be the slice of out at this rank.
  PendingCollective all_gather(const at::Tensor& out, const at::Tensor& in, const std::string& what);
  /// in: [size * n]; slice r goes to rank r. out: [size * n]; slice r comes from rank r. No aliasing.
  PendingCollective all_to_all(const at::Tensor& out, const at::Tensor& in, const std::string& what);
  /// data: contiguous; root's values become everybody's.
  PendingCollective broadcast(const at::Tensor& data, int root, const std::string& what);

 protected:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}

 private:
  int rank_, size_;
};

}  // namespace ballast
