#include "ballast/config/nearest.h"

#include <limits>

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
  int least = std::numeric_limits<int>::max();
  // A distance is at least the difference of the lengths, which spares most of them their table.
  const auto consider = [&](const std::string& a, const std::string& b, int extra, const std::string& candidate) {
    const auto difference = static_cast<int>(a.size() > b.size() ? a.size() - b.size() : b.size() - a.size());
    if (difference + extra >= least) return;
    const int here = edit_distance(a, b) + extra;
    if (here < least) best = &candidate, least = here;
  };
  for (const std::string& candidate : known) {
    consider(wanted, candidate, 0, candidate);
    consider(word, last_word(candidate), kOtherSection, candidate);
  }
  return *best;
}

}  // namespace ballast
