// The wheel's NCCL backend is compiled in; its header is only live behind this switch.
#ifndef USE_C10D_NCCL
#define USE_C10D_NCCL
#endif
#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>

#include <stdexcept>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>
#include <vector>

#include "ballast/comm/nccl.h"

namespace ballast {
namespace {

class NcclFlight final : public Flight {
 public:
  explicit NcclFlight(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}

  /// Makes the current stream wait for the collective; the host doesn't.
  void wait(std::chrono::milliseconds) override { work_->wait(); }

  bool finished() override {
    if (!work_->isCompleted()) return false;
    if (const std::exception_ptr error = work_->exception()) std::rethrow_exception(error);
    return true;
  }
  bool blocks_host() const noexcept override { return false; }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

class NcclTransport final : public Transport {
 public:
  explicit NcclTransport(c10::intrusive_ptr<c10d::ProcessGroupNCCL> group) : group_(std::move(group)) {}

  std::unique_ptr<Flight> all_gather(const at::Tensor& out, const at::Tensor& in, std::uint64_t) override {
    at::Tensor to = out, from = in;
    return std::make_unique<NcclFlight>(group_->_allgather_base(to, from));
  }

  std::unique_ptr<Flight> all_to_all(const at::Tensor& out, const at::Tensor& in, std::uint64_t) override {
    at::Tensor to = out, from = in;
    std::vector<std::int64_t> equal_counts;  // empty: size / ranks each
    return std::make_unique<NcclFlight>(group_->alltoall_base(to, from, equal_counts, equal_counts));
  }

  std::unique_ptr<Flight> broadcast(const at::Tensor& data, int root, std::uint64_t) override {
    std::vector<at::Tensor> tensors{data};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return std::make_unique<NcclFlight>(group_->broadcast(tensors, options));
  }

  /// NCCL connects the ranks in the first collective of each kind, and there it holds up the host until all have come.
  /// A reduction that one rank starts early, which a rank in another branch joins only after the ranks' next meeting,
  /// would never get through.
  void connect(int size, c10::Device device) {
    const at::Tensor mine = at::zeros({size}, at::TensorOptions(at::kByte).device(device));
    const at::Tensor theirs = at::empty_like(mine);
    const at::Tensor all = at::empty({size * mine.numel()}, mine.options());
    all_to_all(theirs, mine, 0)->wait({});
    all_gather(all, mine, 0)->wait({});
    broadcast(mine, 0, 0)->wait({});
    c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> group_;
};

}  // namespace

bool nccl_available() noexcept { return true; }

std::unique_ptr<Transport> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                     c10::Device device, std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  // c10d's watchdog ends the process, naming only its own sequence number. It comes after our watch, which has told
  // which unit was travelling by then.
  constexpr std::chrono::seconds kToTellFirst(5);
  options->timeout = timeout + kToTellFirst;
  auto transport =
      std::make_unique<NcclTransport>(c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options));
  transport->connect(size, device);
  return transport;
}

}  // namespace ballast
