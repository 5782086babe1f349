#pragma once

#include <filesystem>
#include <system_error>

namespace ballast {

/// Removes a file, or a folder with all in it; links themselves, not what they point to. A path that isn't there is
/// removed already. Returns the first error after removing what can be removed.
///
/// For std::filesystem::remove_all: the CUDA builds of LibTorch 2.11 export a copy of that function, which is found
/// before the one of the C++ library and calls a null pointer.
std::error_code remove_tree(const std::filesystem::path& path) noexcept;

}  // namespace ballast
