#include "ballast/config/nearest.h"

#include <algorithm>

#include "ballast/base/edit_distance.h"

namespace ballast {

namespace {

std::string last_word(const std::string& path) { return path.substr(path.rfind('.') + 1); }

/// groups[3] is an element of the list that the tables call groups[].
std::string without_indices(const std::string& path) {
  std::string plain;
  bool inside = false;
  for (const char c : path) {
    if (c == ']') inside = false;
    if (!inside) plain += c;
    if (c == '[') inside = true;
  }
  return plain;
}

}  // namespace

std::string nearest_path(const std::string& path, const std::vector<std::string>& known) {
  constexpr int kOtherSection = 2;
  const std::string wanted = without_indices(path), word = last_word(wanted);
  const std::string* best = nullptr;
  int least = 0;
  for (const std::string& candidate : known) {
    const int here =
        std::min(edit_distance(wanted, candidate), edit_distance(word, last_word(candidate)) + kOtherSection);
    if (best == nullptr || here < least) best = &candidate, least = here;
  }
  return *best;
}

}  // namespace ballast
