#pragma once

#include <filesystem>

namespace ballast::testing {

/// A fresh folder below the system's temporary one, in which the engines of this test program swap; removed when the
/// program ends. Where ranks are processes it is one for all of them, since they must have equal configurations.
const std::filesystem::path& swap_folder();

/// Fails the running test if an engine that has ended left something there.
void expect_nothing_swapped();

}  // namespace ballast::testing
