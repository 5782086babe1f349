// docs/config.md has exactly one table row for every key of the schema, with its range, default and meaning.
#include <algorithm>
#include <fstream>
#include <set>

#include "tests/config/config_json.h"

namespace ballast::schema {
namespace {

/// The last of several only_with values reads: "Adam, AdamW".
std::string row(const KeyInfo& key) {
  std::string meaning = key.meaning;
  if (!key.only_with.empty()) {
    meaning += " With ";
    for (std::size_t i = 0; i < key.only_with.size(); ++i) meaning += (i ? ", " : "") + key.only_with[i];
    meaning += ".";
  }
  if (!key.alias.empty()) meaning += " Also: `" + key.alias + "`.";
  return "| `" + key.path + "` | " + key.allowed.text() + " | " + key.fallback + " | " + meaning + " |";
}

std::string row(const IgnoredKey& key) {
  return "| `" + key.path + "` | " + key.allowed.text() + " | " + key.reason + " |";
}

std::string row(const MissingKey& key) {
  std::string off;
  for (const auto& value : key.off) off += (off.empty() ? "" : ", ") + value.dump();
  return "| `" + key.path + (key.gate.empty() ? "" : "." + key.gate) + "` | " + (off.empty() ? "null" : off) + " | " +
         key.instead + " |";
}

TEST(Documentation, HasTheSchemasRowsAndNoOthers) {
  std::vector<std::string> wanted;
  for (const auto& key : documented_keys()) wanted.push_back(row(key));
  for (const auto& key : ignored_keys()) wanted.push_back(row(key));
  for (const auto& key : missing_keys()) wanted.push_back(row(key));

  std::ifstream file(BALLAST_SOURCE_DIR "/docs/config.md");
  ASSERT_TRUE(file.is_open());
  std::multiset<std::string> documented;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("| `", 0) == 0) documented.insert(line);
  }
  for (const std::string& line : wanted) {
    const auto found = documented.find(line);
    if (found == documented.end()) {
      ADD_FAILURE() << "docs/config.md lacks this row:\n" << line;
    } else {
      documented.erase(found);
    }
  }
  for (const std::string& line : documented) ADD_FAILURE() << "docs/config.md has a row of no key:\n" << line;
}

}  // namespace
}  // namespace ballast::schema
