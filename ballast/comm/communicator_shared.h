#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include "ballast/comm/collective_log.h"
#include "ballast/comm/collective_watch.h"
#include "ballast/comm/communicator.h"
#include "ballast/comm/transport.h"

namespace ballast {

/// One line of an error's text, without LibTorch's backtrace.
std::string cause_of(const std::exception& error);

/// What a communicator and its collectives in flight hold in common.
struct Communicator::Shared {
  int rank = 0, size = 1;
  std::string purpose;
  c10::Device device = c10::kCPU;
  std::chrono::milliseconds timeout{};
  std::unique_ptr<Transport> transport;  // null with one rank
  CollectiveLog log;
  std::mutex mutex;                        // guards what follows
  std::string failure;                     // text of the first error; later launches repeat it instead of waiting
  std::unique_ptr<CollectiveWatch> watch;  // made by the first collective that outlives its wait(); first to go

  /// "rank 1 of 2, communicator gather", for an error.
  std::string context() const;
  /// Watches over a collective that the host doesn't wait for.
  void follow(std::uint64_t sequence, std::unique_ptr<Flight> flight);
};

}  // namespace ballast
