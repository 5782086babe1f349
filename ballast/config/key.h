#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "ballast/config/config.h"

/// The schema: one declarative table of keys. It drives parsing, the search for unknown keys, every error's text, the
/// dump of the effective configuration, docs/config.md and the tests.
namespace ballast::schema {

enum class Kind : std::uint8_t { kBool, kInteger, kNumber, kChoice, kTexts, kPair, kGroups, kText, kObject, kAny };

/// What may stand at a key. The bounds hold for an integer, a number and both elements of a pair.
struct Allowed {
  Kind kind = Kind::kAny;
  double min = -std::numeric_limits<double>::infinity(), max = std::numeric_limits<double>::infinity();
  bool open_min = false, open_max = false;  // the bound itself is not allowed
  bool null = false;                        // null is allowed and means: not given
  std::vector<std::string> choices = {};    // of kChoice, any case; in the order of the enum that they name

  /// "an integer >= 1", "a number in [0, 1)", "one of \"none\", \"cpu\"".
  std::string text() const;
};

/// A choice that DeepSpeed has and Ballast hasn't, with what to use instead.
struct Refused {
  std::string choice, instead;
};

/// A key without its binding: what documentation, errors and tests need.
struct KeyInfo {
  std::string path;  // dotted; "[]" stands for an element of a list
  Allowed allowed;
  std::string meaning;
  std::string fallback = {};                // the default as JSON text, or in words
  std::string alias = {};                   // another path of DeepSpeed's for the same key
  std::vector<Refused> refused = {};        // of kChoice
  std::vector<std::string> only_with = {};  // values of the section's type that have this parameter; empty: all
};

/// A key bound to a field of Owner. read checks the value against `allowed` and throws ConfigError; path is the path as
/// the user wrote it. An empty write: an old form, never written.
template <class Owner>
struct Key {
  KeyInfo info;
  std::function<void(Owner& owner, const nlohmann::json& value, const std::string& path)> read;
  std::function<nlohmann::json(const Owner& owner)> write;
};

/// A key of DeepSpeed's without effect here: its type is checked, and it is listed in Config::notices.
struct IgnoredKey {
  std::string path;
  Allowed allowed;
  std::string reason;
};

/// A key of DeepSpeed's whose feature is missing: an error unless it is switched off, which is then silent.
struct MissingKey {
  std::string path;
  std::string gate;  // the member of the object at `path` that switches it on; empty: the value itself does
  std::vector<nlohmann::json> off;
  std::string instead;  // what is missing, and what to use
};

/// Parameters of one group: optimizer.params and each element of optimizer.params.groups have them.
const std::vector<Key<OptimizerHyper>>& hyper_keys();
/// Keys of zero_optimization that say where states live, part of config_keys().
const std::vector<Key<Config>>& offload_keys();
/// Keys of the section aio, likewise.
const std::vector<Key<Config>>& aio_keys();
/// Every key with effect. A type precedes the parameters that depend on it, hyper-parameters precede the groups.
const std::vector<Key<Config>>& config_keys();
const std::vector<IgnoredKey>& ignored_keys();
const std::vector<MissingKey>& missing_keys();

/// config_keys() and the keys of a group's elements, as documented.
std::vector<KeyInfo> documented_keys();
/// Every path that a file may hold, of all tables, aliases included.
const std::vector<std::string>& known_paths();

/// Does the key apply to this configuration's optimizer and scheduler types?
bool applies(const KeyInfo& key, const Config& config);

/// What is given for a placement that is not chosen and therefore has no effect, one line a key. at: as in
/// Config::from_json.
std::vector<std::string> placement_notices(const ZeroConfig& zero, const std::string& at);

/// Reads optimizer.params.groups; each element starts from the optimizer's own values.
std::vector<OptimizerGroup> read_groups(const Config& config, const nlohmann::json& value, const std::string& path);
nlohmann::json write_groups(const Config& config);

}  // namespace ballast::schema
