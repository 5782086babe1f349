#pragma once

#include <exception>
#include <functional>

#include "ballast/comm/rounds.h"

namespace ballast {

/// Runs a part on this rank that may fail here alone, then lets all ranks know: where it failed on any, all throw the
/// error of the first of those by rank, with the same class and text. Collective; a CommError passes through at once.
void together(Rounds& rounds, const std::function<void()>& part);

}  // namespace ballast
