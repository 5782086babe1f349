#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ballast::cli {

struct TraceSpan {
  std::string row, name;
  std::int64_t begin, end;  // nanoseconds

  bool holds(const TraceSpan& other) const { return begin <= other.begin && other.end <= end; }
  bool overlaps(const TraceSpan& other) const { return begin < other.end && other.begin < end; }
};

/// A trace's spans as a viewer shows them.
class TraceReader {
 public:
  explicit TraceReader(const std::filesystem::path& file) : json_(nlohmann::json::parse(std::ifstream(file))) {
    std::map<std::int64_t, std::string> rows;
    for (const auto& event : json_["traceEvents"])
      if (event["ph"] == "M" && event["name"] == "thread_name") rows[event["tid"]] = event["args"]["name"];
    const auto nanos = [](const nlohmann::json& micros) { return std::llround(micros.get<double>() * 1000); };
    for (const auto& event : json_["traceEvents"]) {
      if (event["ph"] != "X") continue;
      spans_.push_back(
          {rows.at(event["tid"]), event["name"], nanos(event["ts"]), nanos(event["ts"]) + nanos(event["dur"])});
    }
  }

  const nlohmann::json& json() const { return json_; }

  /// Spans of the lane, all its rows, whose names start so, by their begin.
  std::vector<TraceSpan> lane(const std::string& name, const std::string& start = "") const {
    std::vector<TraceSpan> found;
    for (const TraceSpan& span : spans_) {
      const std::string more = span.row.substr(std::min(span.row.size(), name.size()));
      const bool row_of_it = span.row.starts_with(name) && (more.empty() || (more[0] == ' ' && std::isdigit(more[1])));
      if (row_of_it && span.name.starts_with(start)) found.push_back(span);
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const TraceSpan& a, const TraceSpan& b) { return a.begin < b.begin; });
    return found;
  }

  void expect_named(const std::string& lane_name, const std::string& name) const {
    std::string seen;
    for (const TraceSpan& span : lane(lane_name)) {
      if (span.name == name) return;
      seen += span.name + "\n";
    }
    ADD_FAILURE() << "no \"" << name << "\" in lane " << lane_name << ":\n" << seen;
  }

  /// In each row a span holds the next or ends before it; nothing ends before it begins.
  void expect_nested() const {
    std::map<std::string, std::vector<TraceSpan>> open;
    for (const TraceSpan& span : spans_) {
      EXPECT_GE(span.begin, 0) << span.name;
      EXPECT_GE(span.end, span.begin) << span.name;
      auto& holders = open[span.row];
      while (!holders.empty() && holders.back().end <= span.begin) holders.pop_back();
      EXPECT_TRUE(holders.empty() || holders.back().holds(span)) << span.row << ": " << span.name;
      holders.push_back(span);
    }
  }

 private:
  nlohmann::json json_;
  std::vector<TraceSpan> spans_;
};

}  // namespace ballast::cli
