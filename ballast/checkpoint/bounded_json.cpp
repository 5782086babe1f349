#include "ballast/checkpoint/bounded_json.h"

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "ballast/base/error.h"

namespace ballast::ckpt {

nlohmann::json parse_bounded(std::string_view text, int depth, const std::string& file) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::set<std::string>> keys;  // of the objects that are open; of an array an empty set
  const auto watch = [&](int, Event event, nlohmann::json& value) {
    switch (event) {
      case Event::object_start:
      case Event::array_start:
        if (static_cast<int>(keys.size()) == depth)
          throw IoError("checkpoint.read", "JSON is nested too deeply (", file, "; most ", depth, " levels)");
        keys.emplace_back();
        break;
      case Event::object_end:
      case Event::array_end:
        keys.pop_back();
        break;
      case Event::key:
        if (!keys.back().insert(value.get<std::string>()).second)
          throw IoError("checkpoint.read", "a name stands twice (", file, "; ",
                        value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace), ")");
        break;
      default:
        break;
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text.begin(), text.end(), watch);
  } catch (const nlohmann::json::exception& e) {
    throw IoError("checkpoint.read", "not valid JSON (", file, "; ", e.what(), ")");
  }
}

}  // namespace ballast::ckpt
