#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <string>

#include "ballast/base/process_mark.h"
#include "ballast/tiers/device_stream.h"

namespace ballast {

/// Parameters fault in like pages. The storage behind a unit's parameters carries a DataPtr of ours whether it is
/// mapped (memory there) or not (null), so an operator's input tells in one comparison whether it is one of ours. An
/// observer on ATen operators (at::RecordFunction) finds such inputs before the operator runs and reports them.

/// Whom the operators' touches are reported to. Called on the thread that runs the operator: the caller's, or
/// autograd's.
class FaultHandler {
 public:
  virtual ~FaultHandler() = default;
  /// An operator that reads or writes this unit is about to run: map it and keep it mapped until unpin. Must not throw
  /// (RecordFunction would swallow it): on failure it leaves the storage armed, so that the operator itself throws.
  virtual void touch_and_pin(int unit) noexcept = 0;
  virtual void unpin(int unit) noexcept = 0;
  /// After touch_and_pin: the operator writes there, and somebody outside the engine runs it. element: the first one,
  /// counted from the unit's begin.
  virtual void written(int unit, std::int64_t element) noexcept = 0;
  /// Instead of all these in a forked child, which has neither the threads nor the connections that map a unit: arms
  /// the storage unless it can be read as it is. Takes no lock: who held one at the fork isn't there to let it go.
  virtual void touch_in_child(int unit) noexcept = 0;
  bool is_here() const noexcept { return process_.is_here(); }

 private:
  const ProcessMark process_;
};

/// The storage of one unit's flat buffer, of which the module's parameters are views.
class FaultStorage {
 public:
  FaultStorage() = default;
  /// flat: 1-D, owns its storage alone. mapped: keeps its memory, else it is unmapped afterwards.
  FaultStorage(FaultHandler* handler, int unit, at::Tensor flat, const std::string& why_unmapped, bool mapped = false);

  /// Allocates memory on the current stream; contents undefined. MemoryError with the bytes wanted.
  void map();
  /// Frees the memory to the allocator; streams other than the mapping one must have been named to
  /// used_on_current_stream.
  void unmap() noexcept;
  bool mapped() const noexcept;
  /// Hides the memory without freeing it, until put_back(): to everybody the storage is unmapped.
  void set_aside() noexcept;
  void put_back() noexcept;
  /// Makes any access to the (unmapped) data throw `why` instead of reading null.
  void arm(const std::string& why) noexcept;
  /// That, saying that this is a forked child, unless the data is there. name: the unit's.
  void arm_in_child(const std::string& name) noexcept;
  /// On a device, where a program may use parameters on several streams. The values have come, on the calling thread's
  /// current stream or behind a wait there.
  void filled_on_current_stream();
  /// An operator there is about to use them: it runs behind that, and the memory is not reused before it has.
  void used_on_current_stream() const;
  /// Hands the module an ordinary storage again. Mapped: with its memory; unmapped: any access throws `why_empty`.
  void surrender(const std::string& why_empty) noexcept;

  const at::Tensor& flat() const { return flat_; }

 private:
  void install(c10::DataPtr memory) noexcept;
  FaultHandler* handler_ = nullptr;
  int unit_ = -1;
  at::Tensor flat_;
  std::string why_unmapped_;
  c10::DataPtr aside_;
  bool is_aside_ = false;  // an empty unit has no memory to tell by
  std::optional<c10::Stream> filled_on_;
  tiers::DeviceEvent filled_;
};

/// Keeps the process-wide observer installed while any instance lives (it costs about 0.5 us an operator, so there is
/// none without a sharded engine). Engines and threads share the one registration.
class FaultObserver {
 public:
  FaultObserver();
  ~FaultObserver();
  FaultObserver(const FaultObserver&) = delete;
  FaultObserver& operator=(const FaultObserver&) = delete;
};

}  // namespace ballast
