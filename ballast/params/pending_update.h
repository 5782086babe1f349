#pragma once

#include <memory>
#include <string_view>

#include "ballast/tiers/device_stream.h"
#include "ballast/tiers/host_lane.h"

namespace ballast {

/// An update of a unit's parameters that step() decided on and the host lane still has to finish.
class PendingUpdate {
 public:
  PendingUpdate() = default;  // none
  /// published: set by the lane's job before it ends.
  PendingUpdate(tiers::HostLane& lane, tiers::HostLane::Ticket ticket, std::shared_ptr<tiers::DeviceEvent> published)
      : lane_(&lane), ticket_(ticket), published_(std::move(published)) {}

  /// Nobody has waited for it yet.
  explicit operator bool() const { return lane_ != nullptr; }
  /// There is nothing to wait for any more: a matter of timing, which differs between ranks.
  bool has_run() const { return lane_ == nullptr || lane_->has_run(ticket_); }
  /// When it returns, the host and what is queued on the current stream from now on see the new values. On another
  /// stream they are only there behind a wait of its own, also when this has run. Throws what ended the lane. unit: its
  /// name, for the trace.
  void wait(std::string_view unit) {
    if (lane_ != nullptr) lane_->wait(ticket_, "update of", unit);
    lane_ = nullptr;
    if (published_) published_->block_current_stream();
  }

 private:
  tiers::HostLane* lane_ = nullptr;
  tiers::HostLane::Ticket ticket_ = 0;
  std::shared_ptr<tiers::DeviceEvent> published_;
};

}  // namespace ballast
