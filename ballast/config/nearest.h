#pragma once

#include <string>
#include <vector>

namespace ballast {

/// The known path nearest to this one, by edit distance over whole dotted paths; a right last word in the wrong section
/// counts as two edits. The first of equals wins. known isn't empty.
std::string nearest_path(const std::string& path, const std::vector<std::string>& known);

}  // namespace ballast
