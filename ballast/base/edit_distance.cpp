#include "ballast/base/edit_distance.h"

#include <algorithm>
#include <numeric>

namespace ballast {

int edit_distance(const std::string& a, const std::string& b) {
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (std::size_t i = 0; i < a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i) + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const int substitution = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j + 1] + 1, row[j] + 1, substitution});
    }
  }
  return row.back();
}

std::string nearest(const std::string& name, const std::vector<std::string>& candidates) {
  if (candidates.empty()) return "none";
  return *std::min_element(candidates.begin(), candidates.end(), [&](const std::string& a, const std::string& b) {
    return edit_distance(name, a) < edit_distance(name, b);
  });
}

}  // namespace ballast
