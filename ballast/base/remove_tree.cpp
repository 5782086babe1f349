#include "ballast/base/remove_tree.h"

#include <ftw.h>

#include <cerrno>
#include <cstdio>

namespace ballast {
namespace {

thread_local int first_error;  // nftw hands nothing on to its callback

int remove_entry(const char* path, const struct stat*, int, FTW*) {
  if (std::remove(path) != 0 && errno != ENOENT && first_error == 0) first_error = errno;
  return 0;
}

}  // namespace

std::error_code remove_tree(const std::filesystem::path& path) noexcept {
  constexpr int kDescriptors = 16;
  first_error = 0;
  // Contents before their folder, links not followed.
  if (::nftw(path.c_str(), remove_entry, kDescriptors, FTW_DEPTH | FTW_PHYS) != 0 && errno != ENOENT &&
      first_error == 0)
    first_error = errno;
  return {first_error, std::generic_category()};
}

}  // namespace ballast
