#include "ballast/tiers/lane_hook.h"

#include <utility>

namespace ballast::testing {
namespace {

thread_local LaneHook::Body hook;

}  // namespace

LaneHook::LaneHook(Body body) : outer_(std::exchange(hook, std::move(body))) {}
LaneHook::~LaneHook() { hook = std::move(outer_); }

const LaneHook::Body& LaneHook::current() { return hook; }

}  // namespace ballast::testing
