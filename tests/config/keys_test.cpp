// Every key of the schema, automatically from its table, fed wrong types, wrong ranges and misspellings.
#include <cmath>
#include <set>

#include "ballast/config/nearest.h"
#include "tests/config/config_json.h"

namespace ballast::schema {
namespace {

using nlohmann::json;
using testing::error_of;
using testing::get_path;
using testing::set_path;
using testing::with_key;
using testing::written;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::vector<json> wrong_types(const Allowed& allowed) {
  const json object{{"no", "sense"}};
  std::vector<json> values;
  switch (allowed.kind) {
    case Kind::kBool:
      values = {0, 1, 1.0, "true", "no", json::array(), object};
      break;
    case Kind::kInteger:
      values = {true, false, 1.5, "1", "5e8", "5e8x", "nan", json::array({1}), object};
      break;
    case Kind::kNumber:
      values = {true, "1.0", "inf", "NaN", "1e-3x", json::array({1.0}), object};
      break;
    case Kind::kChoice:
    case Kind::kText:
      values = {true, 0, 1.5, json::array({"none"}), object};
      break;
    case Kind::kTexts:
      values = {true, 1, object, json::array({1}), json::array({"a", true})};
      break;
    case Kind::kPair:
      values = {true, 0.9, "0.9", json::array(), {0.9}, {0.9, 0.99, 0.999}, {0.9, true}, {"0.9", 0.99}, object};
      break;
    case Kind::kGroups:
      values = {true, 1, "a", object, json::array({1}), json::array({"a"})};
      break;
    case Kind::kObject:
      values = {true, 1, "a", json::array()};
      break;
    case Kind::kAny:
      break;
  }
  if (!allowed.null) values.push_back(nullptr);
  return values;
}

std::vector<json> wrong_ranges(const Allowed& allowed) {
  std::vector<json> values;
  const bool integer = allowed.kind == Kind::kInteger;
  if (integer || allowed.kind == Kind::kNumber) {
    values = {kInfinity, -kInfinity, std::nan("")};
    if (integer) values.insert(values.end(), {1e30, -1e30, 18446744073709551615ULL});
    const double beyond = integer ? 1 : 0.5;
    if (std::isfinite(allowed.min)) values.push_back(allowed.min - beyond);
    if (std::isfinite(allowed.max)) values.push_back(allowed.max + beyond);
    if (allowed.open_min) values.push_back(allowed.min);
    if (allowed.open_max) values.push_back(allowed.max);
  }
  if (allowed.kind == Kind::kPair) values = {{-0.1, 0.9}, {0.9, 1.0}, {0.9, 2}, {kInfinity, 0.9}, {0.9, std::nan("")}};
  if (allowed.kind == Kind::kChoice) values = {"", "no-such-thing"};
  if (allowed.kind == Kind::kTexts) values = {json::array({""}), ""};
  return values;
}

json right_value(const Allowed& allowed) {
  switch (allowed.kind) {
    case Kind::kBool:
      return true;
    case Kind::kInteger:
      return std::isfinite(allowed.max) ? allowed.max : std::max(allowed.min, 0.0) + 7;
    case Kind::kNumber:
      return std::isfinite(allowed.max) ? allowed.max / 2 : 0.25;
    case Kind::kChoice:
      return allowed.choices.back();
    case Kind::kTexts:
      return {"blocks.*", "b"};
    case Kind::kPair:
      return {0.5, 0.75};
    case Kind::kGroups:
      return json::array({{{"patterns", "*.bias"}}});
    case Kind::kText:
      return "text";
    case Kind::kObject:
      return json::object();
    case Kind::kAny:
      return 1;
  }
  return nullptr;
}

/// Placements want keys of their neighbours: a folder for nvme, stage 3 for parameters, an update on the host.
void choose_around(const KeyInfo& key, json& root) {
  const std::string zero = "zero_optimization.", device = ".device";
  if (contains(key.path, "offload_param.device") || contains(key.path, "cpu_offload_param")) {
    set_path(root, zero + "stage", 3);
  }
  if (contains(key.path, "offload_gradients.device")) set_path(root, zero + "offload_optimizer.device", "cpu");
  if (key.allowed.kind == Kind::kChoice && key.allowed.choices.back() == "nvme") {
    set_path(root, key.path.substr(0, key.path.size() - device.size()) + ".nvme_path", "/swap");
  }
}

/// One wrong letter at each place of the last word, a letter lost, and two neighbours swapped.
std::vector<std::string> misspellings(const std::string& path) {
  const std::size_t start = path.rfind('.') + 1;
  std::vector<std::string> all;
  for (std::size_t i = start; i < path.size(); ++i) {
    if (path[i] == '[' || path[i] == ']' || path[i] == '1') continue;
    all.push_back(path);
    all.back()[i] = '1';
  }
  if (path.size() - start > 4) {
    all.push_back(path);
    all.back().erase(start + 2, 1);
    all.push_back(path);
    std::swap(all.back()[start + 2], all.back()[start + 3]);
    if (all.back() == path) all.pop_back();  // equal neighbours
  }
  return all;
}

void expect_nearest(json root, const std::string& path) {
  for (const std::string& wrong : misspellings(path)) {
    json misspelled = root;
    set_path(misspelled, wrong, 3);
    const std::string error = error_of(misspelled);
    EXPECT_TRUE(contains(error, "unknown key (" + written(wrong) + " = 3;")) << error;
    EXPECT_TRUE(contains(error, "nearest known key: " + path + ")")) << error << "\nwant " << path;
  }
}

TEST(EveryKey, OfTheWrongTypeIsAnErrorWithKeyAndValue) {
  for (const KeyInfo& key : documented_keys()) {
    for (const json& value : wrong_types(key.allowed)) {
      const std::string error = error_of(with_key(key, value));
      EXPECT_TRUE(contains(error, "wrong type (" + written(key.path))) << key.path << " = " << value << ": " << error;
      EXPECT_TRUE(contains(error, "want " + key.allowed.text()) || key.allowed.kind == Kind::kGroups) << error;
    }
  }
}

TEST(EveryKey, OutOfItsRangeIsAnErrorWithKeyAndValue) {
  for (const KeyInfo& key : documented_keys()) {
    for (const json& value : wrong_ranges(key.allowed)) {
      const std::string error = error_of(with_key(key, value));
      EXPECT_TRUE(contains(error, "out of range (" + written(key.path)) ||
                  contains(error, "unknown value (" + written(key.path)))
          << key.path << " = " << value << ": " << error;
      EXPECT_TRUE(contains(error, "want " + key.allowed.text())) << error;
    }
  }
}

TEST(EveryKey, MisspelledIsAnErrorThatNamesTheRightOne) {
  for (const KeyInfo& key : documented_keys()) expect_nearest(json::object(), key.path);
  for (const IgnoredKey& key : ignored_keys()) expect_nearest(json::object(), key.path);
  for (const MissingKey& key : missing_keys()) expect_nearest(json::object(), key.path);
}

TEST(EveryKey, TakesARightValueAndWritesItBack) {
  for (const KeyInfo& key : documented_keys()) {
    json root = with_key(key, right_value(key.allowed));
    if (key.path == "optimizer.params.adam_w_mode") set_path(root, "optimizer.type", "AdamW");  // as true writes it
    if (contains(key.path, "nesterov")) set_path(root, "optimizer.params.momentum", 0.5);
    if (key.path == "scheduler.type") set_path(root, "scheduler.params.total_num_steps", 10);  // WarmupCosineLR's
    choose_around(key, root);
    ASSERT_EQ(error_of(root), "") << root;
    const Config config = Config::from_json(root);
    Config again = Config::from_json(config.to_json());
    again.notices = config.notices;
    EXPECT_EQ(config, again) << root << "\n" << config.to_json();
    if (contains(key.path, ".cpu_offload")) continue;  // an old form: written as its new one
    const json written_back = get_path(config.to_json(), key.path);
    if (key.allowed.kind == Kind::kGroups) {
      EXPECT_EQ(written_back[0]["patterns"], json::array({"*.bias"}));
    } else {
      EXPECT_EQ(written_back, right_value(key.allowed)) << key.path;
    }
  }
}

TEST(EveryKey, SetToAutoTakesItsDefaultAndSaysSo) {
  for (const KeyInfo& key : documented_keys()) {
    if (contains(key.path, "[]") || key.path == "scheduler.params.total_num_steps") continue;
    if (key.path == "zero_optimization.offload_gradients.device") continue;  // has a choice of this name
    const Config plain = Config::from_json(testing::where_it_applies(key));
    Config config = Config::from_json(with_key(key, "auto"));
    if (key.path == "optimizer.type" || key.path == "scheduler.type" || key.only_with.empty()) {
      ASSERT_EQ(config.notices.size(), 1u) << key.path;
    }
    ASSERT_FALSE(config.notices.empty()) << key.path;
    EXPECT_TRUE(contains(config.notices.back(), key.path + " = \"auto\"")) << config.notices.back();
    config.notices = plain.notices;
    EXPECT_EQ(config, plain) << key.path;
  }
}

TEST(EveryKey, OfAnotherOptimizerOrSchedulerIsAnError) {
  for (const KeyInfo& key : documented_keys()) {
    if (key.only_with.empty()) continue;
    const bool optimizer = key.path.rfind("optimizer.", 0) == 0;
    json root = with_key(key, right_value(key.allowed));
    set_path(root, optimizer ? "optimizer.type" : "scheduler.type", optimizer ? "SGD" : "none");
    if (optimizer && key.only_with.front() == "SGD") set_path(root, "optimizer.type", "AdamW");
    if (!optimizer) root["scheduler"]["params"] = {{key.path.substr(17), right_value(key.allowed)}};
    const std::string error = error_of(root);
    EXPECT_TRUE(contains(error, "not a parameter of this")) << root << error;
    EXPECT_TRUE(contains(error, written(key.path))) << error;
    EXPECT_TRUE(contains(error, key.only_with.back())) << error;
  }
}

TEST(EveryKey, StandsInOneTableOnly) {
  std::set<std::string> paths;
  for (const KeyInfo& key : documented_keys()) {
    EXPECT_TRUE(paths.insert(key.path).second) << key.path;
    EXPECT_TRUE(key.alias.empty() || paths.insert(key.alias).second) << key.alias;
  }
  for (const IgnoredKey& key : ignored_keys()) EXPECT_TRUE(paths.insert(key.path).second) << key.path;
  for (const MissingKey& key : missing_keys()) EXPECT_TRUE(paths.insert(key.path).second) << key.path;
}

TEST(EveryAlias, MeansItsKeyAndRefusesBothNames) {
  for (const KeyInfo& key : documented_keys()) {
    if (key.alias.empty()) continue;
    json by_alias = json::object(), both = json::object();
    set_path(by_alias, key.alias, right_value(key.allowed));
    EXPECT_EQ(Config::from_json(by_alias), Config::from_json(with_key(key, right_value(key.allowed)))) << key.alias;
    set_path(both, key.alias, right_value(key.allowed));
    set_path(both, key.path, right_value(key.allowed));
    EXPECT_TRUE(contains(error_of(both), "given twice under two names")) << error_of(both);
  }
}

TEST(EveryKeyWithoutEffect, IsListedOnceWithItsReason) {
  for (const IgnoredKey& key : ignored_keys()) {
    json root = json::object();
    set_path(root, key.path, right_value(key.allowed));
    Config config = Config::from_json(root);
    ASSERT_EQ(config.notices.size(), 1u) << key.path;
    EXPECT_EQ(config.notices[0], key.path + " has no effect: " + key.reason);
    config.notices.clear();
    EXPECT_EQ(config, Config()) << key.path;
    for (const json& value : wrong_types({.kind = key.allowed.kind, .null = key.allowed.null})) {
      const bool number = key.allowed.kind == Kind::kInteger && value.is_number();  // 1.5 means nothing here either
      set_path(root, key.path, value);
      EXPECT_TRUE(number || contains(error_of(root), "wrong type (" + key.path)) << key.path << " = " << value;
    }
  }
}

TEST(EveryMissingFeature, IsAnErrorThatNamesAnAlternativeUnlessItIsOff) {
  for (const MissingKey& key : missing_keys()) {
    const std::string gate = key.gate.empty() ? key.path : key.path + "." + key.gate;
    json root = json::object();
    set_path(root, gate, "on");
    const std::string error = error_of(root);
    EXPECT_TRUE(contains(error, "not supported (" + gate + " = \"on\"; " + key.instead + ")")) << error;
    std::vector<json> off = key.off;
    off.insert(off.end(), {nullptr, "auto"});
    for (const json& value : off) {
      json quiet = json::object();
      set_path(quiet, gate, value);
      EXPECT_EQ(error_of(quiet), "") << quiet;
      EXPECT_TRUE(Config::from_json(quiet).notices.empty()) << quiet;
    }
  }
}

TEST(EveryRefusedChoice, NamesWhatToUse) {
  int refused = 0;
  for (const KeyInfo& key : documented_keys()) {
    for (const Refused& choice : key.refused) {
      const std::string error = error_of(with_key(key, choice.choice));
      EXPECT_TRUE(contains(error, "not supported (" + key.path + " = \"" + choice.choice + "\"; " + choice.instead))
          << error;
      ++refused;
    }
  }
  EXPECT_GE(refused, 11);
}

TEST(Nearest, CountsEditsOverTheWholePath) {
  EXPECT_EQ(nearest_path("zero_optimisation", known_paths()), "zero_optimization");
  EXPECT_EQ(nearest_path("stage", known_paths()), "zero_optimization.stage");
  EXPECT_EQ(nearest_path("fp16.gradient_clipping", known_paths()), "gradient_clipping");
  EXPECT_EQ(nearest_path("optimizer.params.groups[2].pattern", known_paths()), "optimizer.params.groups[].patterns");
}

}  // namespace
}  // namespace ballast::schema
