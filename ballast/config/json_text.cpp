#include "ballast/config/json_text.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "ballast/base/error.h"

namespace ballast {

namespace {

using nlohmann::json;

constexpr const char* kRead = "config.read";

/// "line 3, column 12" of the character that `read` characters lead up to.
std::string position(const std::string& text, std::size_t read) {
  const std::size_t at = std::min(text.size(), read > 0 ? read - 1 : 0);
  std::size_t line = 1, start = 0;
  for (std::size_t i = 0; i < at; ++i) {
    if (text[i] == '\n') ++line, start = i + 1;
  }
  return "line " + std::to_string(line) + ", column " + std::to_string(at - start + 1);
}

/// The parser's reason without its own prefix, which repeats the position.
std::string reason(const std::string& what) {
  const auto colon = what.find(": ");
  return colon == std::string::npos ? what : what.substr(colon + 2);
}

/// Refuses a key that one object has twice; nlohmann's parser would silently keep the last.
class RepeatedKeys {
 public:
  explicit RepeatedKeys(const std::string& source) : source_(source) {}

  bool operator()(int, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
        open_.emplace_back();
        break;
      case json::parse_event_t::object_end:
        open_.pop_back();
        break;
      case json::parse_event_t::key:
        enter(parsed.get<std::string>());
        break;
      default:
        break;
    }
    return true;
  }

 private:
  struct Object {
    std::set<std::string> keys;
    std::string current;
  };

  void enter(const std::string& key) {
    open_.back().current = key;
    if (open_.back().keys.insert(key).second) return;
    std::string path;
    for (const Object& object : open_) path += (path.empty() ? "" : ".") + object.current;
    throw ConfigError(kRead, "a key stands twice in one object (", path, "; ", source_, ")");
  }

  const std::string& source_;
  std::vector<Object> open_;
};

}  // namespace

json parse_json(const std::string& text, const std::string& source) {
  try {
    return json::parse(text, RepeatedKeys(source));
  } catch (const json::parse_error& error) {
    const std::size_t at = error.byte > 0 ? error.byte - 1 : 0;
    const bool comment = at < text.size() && (text[at] == '/' || text[at] == '#' || (at > 0 && text[at - 1] == '/'));
    throw ConfigError(kRead, "not JSON (", source, ", ", position(text, error.byte), ": ", reason(error.what()),
                      comment ? "; JSON has no comments" : "", ")");
  } catch (const json::exception& error) {  // a number that no double holds: 1e999
    throw ConfigError(kRead, "not JSON (", source, ": ", reason(error.what()), ")");
  }
}

json read_json_file(const std::filesystem::path& file) {
  std::error_code code;
  if (std::filesystem::is_directory(file, code)) {
    throw ConfigError(kRead, "cannot read (", file.string(), ": it is a folder; want a JSON file)");
  }
  errno = 0;
  std::ifstream in(file, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  if (!in.is_open() || in.bad()) {
    throw ConfigError(kRead, "cannot read (", file.string(), ": ", std::strerror(errno != 0 ? errno : EIO), ")");
  }
  return parse_json(text, file.string());
}

}  // namespace ballast
