// Every key of the command line's own sections, from its table: documented, and fed wrong types, wrong ranges and
// misspellings.
#include "cli/run_keys.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "ballast/base/error.h"

namespace ballast::cli {
namespace {

using nlohmann::json;
using schema::Kind;

json smallest() { return {{"data", {{"path", "text"}}}, {"engine", {{"managed_gradient_accumulation", false}}}}; }

std::string error_of(const std::string& path, const json& value) {
  json root = smallest();
  const auto dot = path.find('.');
  root[path.substr(0, dot)][path.substr(dot + 1)] = value;
  try {
    RunFile::from_json(root, "run");
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "";
}

std::vector<json> wrong_types(const schema::Allowed& allowed) {
  const json object{{"no", "sense"}};
  switch (allowed.kind) {
    case Kind::kBool:
      return {0, 1.0, "true", json::array(), object, nullptr};
    case Kind::kInteger:
      return {true, 1.5, "1", json::array({1}), object, nullptr};
    case Kind::kNumber:
      return {true, "1.0", json::array({1.0}), object, nullptr};
    case Kind::kChoice:
    case Kind::kText:
      return {true, 1, json::array({"a"}), object, nullptr};
    case Kind::kTexts:
      return {true, 1, object, json::array({1}), nullptr};
    case Kind::kPair:
      return {true, "1",   json::array({1}), json::array({1, 2, 3}), json::array({1, "2"}), json::array({1.5, 2}),
              1.5,  object};
    default:
      ADD_FAILURE() << "a kind without wrong types";
      return {};
  }
}

std::vector<json> wrong_ranges(const schema::Allowed& allowed) {
  std::vector<json> values;
  if (allowed.kind == Kind::kChoice) values = {"", "no-such-thing"};
  if (allowed.kind == Kind::kPair) values = {json::array({0, 1}), json::array({2, 1}), 0, json::array({1, 1e7})};
  if (allowed.kind != Kind::kInteger && allowed.kind != Kind::kNumber) return values;
  const double beyond = allowed.kind == Kind::kInteger ? 1 : 0.5;
  if (std::isfinite(allowed.min)) values.push_back(allowed.open_min ? allowed.min : allowed.min - beyond);
  if (std::isfinite(allowed.max)) values.push_back(allowed.open_max ? allowed.max : allowed.max + beyond);
  return values;
}

TEST(RunKeys, WrongTypesAndRangesNameKeyAndValue) {
  for (const auto& key : run_keys()) {
    for (const json& value : wrong_types(key.info.allowed)) {
      const std::string error = error_of(key.info.path, value);
      EXPECT_NE(error.find("wrong type (" + key.info.path + " = " + value.dump()), std::string::npos)
          << key.info.path << " = " << value << ": " << error;
    }
    for (const json& value : wrong_ranges(key.info.allowed)) {
      const std::string error = error_of(key.info.path, value);
      EXPECT_NE(error.find(key.info.path), std::string::npos) << key.info.path << " = " << value << ": " << error;
      EXPECT_NE(error.find("want "), std::string::npos) << error;
    }
  }
}

TEST(RunKeys, AMisspellingNamesTheNearestKey) {
  for (const auto& key : run_keys()) {
    std::string wrong = key.info.path;
    wrong.back() = 'x';
    const std::string error = error_of(wrong, 1);
    EXPECT_EQ(error, "[config.parse] unknown key (" + wrong + " = 1; nearest known key: " + key.info.path + ")");
  }
}

TEST(RunKeys, DefaultsAreTheDocumentedOnes) {
  const RunFile defaults;
  for (const auto& key : run_keys()) {
    if (key.info.path == "data.path" || key.info.path == "train.name") continue;  // in words
    EXPECT_EQ(key.write(defaults).dump(), key.info.fallback) << key.info.path;
  }
}

TEST(RunKeys, DocumentationHasTheirRowsAndNoOthers) {
  std::ifstream file(BALLAST_SOURCE_DIR "/docs/train.md");
  ASSERT_TRUE(file.is_open());
  std::multiset<std::string> documented;
  for (std::string line; std::getline(file, line);)
    if (line.rfind("| `", 0) == 0) documented.insert(line);
  for (const auto& key : run_keys()) {
    const std::string row = "| `" + key.info.path + "` | " + key.info.allowed.text() + " | " + key.info.fallback +
                            " | " + key.info.meaning + " |";
    const auto found = documented.find(row);
    if (found == documented.end())
      ADD_FAILURE() << "docs/train.md lacks this row:\n" << row;
    else
      documented.erase(found);
  }
  for (const std::string& row : documented) ADD_FAILURE() << "docs/train.md has a row of no key:\n" << row;
}

}  // namespace
}  // namespace ballast::cli
