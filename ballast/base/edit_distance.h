#pragma once

#include <string>
#include <vector>

namespace ballast {

/// Levenshtein distance: least number of insertions, deletions and substitutions of one character.
int edit_distance(const std::string& a, const std::string& b);

/// The candidate with the least distance to `name`, the first of equals; "none" where there are no candidates.
std::string nearest(const std::string& name, const std::vector<std::string>& candidates);

}  // namespace ballast
