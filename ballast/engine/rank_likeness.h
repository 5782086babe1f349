#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/comm/rounds.h"
#include "ballast/config/config.h"
#include "ballast/layout/layout.h"

namespace ballast {

// What a program must give all ranks alike. Where it doesn't, they would meet in mismatched collectives, or drift apart
// without a word, far from the cause.

/// Collective. CommError where configurations or the modules' parameters differ.
void check_same_everywhere(Rounds& rounds, const Config& config, const Layout& layout);

/// Collective. UseError, with the remedy, where the ranks' requests (as texts) differ.
void check_same_request(Rounds& rounds, const char* operation, const char* remedy, const std::string& request);

/// A number to compare learning rates by in a round that takes place anyway.
std::uint64_t digest(const std::vector<double>& rates);
/// Collective, after a round in which the digests differed. CommError with the rates of the first two ranks that
/// differ.
[[noreturn]] void refuse_different_rates(Rounds& rounds, const std::vector<double>& mine);

}  // namespace ballast
