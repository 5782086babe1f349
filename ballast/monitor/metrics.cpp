#include "ballast/monitor/metrics.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <system_error>

#include "ballast/base/error.h"

namespace ballast::monitor {
namespace {

constexpr const char* kElsewhere = "; free space there, or choose another folder, in a run file train.folder)";

std::string shortest(double value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return {text.data(), end};
}

std::optional<double> number_in(const std::string& line, std::size_t at) {
  double value = 0;
  const bool found =
      at < line.size() && std::from_chars(line.data() + at, line.data() + line.size(), value).ec == std::errc();
  return found ? std::optional(value) : std::nullopt;
}

// Of a row of the CSV. No cell has a comma.
std::optional<double> cell(const std::string& row, std::size_t column) {
  std::size_t at = 0;
  for (; column > 0; --column) {
    at = row.find(',', at);
    if (at++ == std::string::npos) return std::nullopt;
  }
  return number_in(row, at);
}

// Behind the header; a line without an end was torn.
std::vector<std::string> whole_lines(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line) && !file.eof();) lines.push_back(std::move(line));
  return lines;
}

}  // namespace

MetricsFiles::File MetricsFiles::create(const std::filesystem::path& path) {
  File file{path, {std::fopen(path.c_str(), "we"), {}}};
  if (!file.file)
    throw IoError("monitor.create", "can't write the file (", path.string(), ": ", std::strerror(errno), kElsewhere);
  return file;
}

void MetricsFiles::append(const File& to, const std::string& line) {
  const bool written = std::fwrite(line.data(), 1, line.size(), to.file.get()) == line.size();
  if (!written || std::fflush(to.file.get()) != 0)
    throw IoError("monitor.write", "can't write the file (", to.path.string(), ": ", std::strerror(errno), kElsewhere);
}

MetricsFiles::MetricsFiles(const std::filesystem::path& folder, std::vector<std::string> columns,
                           const std::optional<MetricsPoint>& from)
    : columns_(std::move(columns)) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error)
    throw IoError("monitor.create", "can't create the folder (", folder.string(), ": ", error.message(), kElsewhere);
  std::string header;
  for (const std::string& column : columns_) header += (header.empty() ? "" : ",") + column;
  std::string rows, objects;
  if (from) {
    rows = take_up(folder / "metrics.csv", header, *from);
    const std::size_t key = columns_.front().size() + std::string("{\"\": ").size();
    for (const std::string& line : whole_lines(folder / "metrics.jsonl"))
      if (kept_ > 0 && number_in(line, key).value_or(from->key + 1) <= from->key) objects += line + "\n";
  }
  csv_ = create(folder / "metrics.csv");
  jsonl_ = create(folder / "metrics.jsonl");
  append(csv_, header + "\n" + rows);
  append(jsonl_, objects);
}

// The rows up to the point, each a step behind the one before; the files go aside where that isn't so.
std::string MetricsFiles::take_up(const std::filesystem::path& csv, const std::string& header,
                                  const MetricsPoint& from) {
  const std::vector<std::string> lines = whole_lines(csv);
  if (lines.size() < 2) return "";
  const auto column = std::find(columns_.begin(), columns_.end(), from.column) - columns_.begin();
  bool leads_there = lines.front() == header;
  std::optional<double> last;
  std::string rows;
  for (std::size_t i = 1; i < lines.size() && leads_there && last != from.key; ++i) {
    const std::optional<double> key = cell(lines[i], 0);
    leads_there = key && (!last || *key == *last + 1);
    last = key;
    if (leads_there && last == from.key) leads_there = cell(lines[i], static_cast<std::size_t>(column)) == from.value;
    rows += lines[i] + "\n";
    ++kept_;
  }
  if (leads_there && last == from.key) {
    cut_ = static_cast<std::int64_t>(lines.size()) - 1 - kept_;
    return rows;
  }
  kept_ = 0;
  put_aside_ = true;
  for (const char* ending : {".csv", ".jsonl"}) {
    const std::filesystem::path file = std::filesystem::path(csv).replace_extension(ending);
    std::error_code error;
    std::filesystem::rename(file, file.string() + ".old", error);
    if (error && error != std::errc::no_such_file_or_directory)
      throw IoError("monitor.create", "can't put the file aside (", file.string(), ": ", error.message(), kElsewhere);
  }
  return "";
}

void MetricsFiles::write(const std::vector<std::optional<double>>& row) {
  check_eq<UseError>("monitor.write", "a row has one cell for each column", row.size(), columns_.size(), "cells");
  std::string csv, jsonl = "{";
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (i > 0) csv += ',';
    if (!row[i]) continue;
    const bool finite = std::isfinite(*row[i]);
    if (finite) csv += shortest(*row[i]);
    jsonl.append(jsonl.size() > 1 ? ", \"" : "\"").append(columns_[i]).append("\": ");
    jsonl += finite ? shortest(*row[i]) : "null";
  }
  append(csv_, csv + "\n");
  append(jsonl_, jsonl + "}\n");
}

}  // namespace ballast::monitor
