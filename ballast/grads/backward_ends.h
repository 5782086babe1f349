#pragma once

#include <functional>
#include <memory>

namespace ballast {

/// Tells when a backward ends that nobody has announced, like a plain loss.backward(): an observer on autograd's nodes
/// asks autograd for a call at the end of every outermost backward (a re-entrant one, as of activation checkpointing,
/// ends inside another). Costs about 0.2 us a node, so it is there only while an engine lives.
class BackwardEnds {
 public:
  /// sink: called at the end of an awaited backward, on the thread that called it; not if it fails.
  explicit BackwardEnds(std::function<void()> sink);
  ~BackwardEnds();
  BackwardEnds(const BackwardEnds&) = delete;
  BackwardEnds& operator=(const BackwardEnds&) = delete;

  /// The outermost backward that the node or hook running on this thread belongs to; -1 outside of any. Never used
  /// twice.
  static int outermost() noexcept;
  /// From a node or hook of that backward: sink wants to hear of its end. Forgets what was awaited before.
  void await(int outermost);

  struct Awaited {
    std::function<void()> sink;
    int outermost = -1;
  };

 private:
  std::shared_ptr<Awaited> awaited_;
};

}  // namespace ballast
