#include "ballast/monitor/metrics.h"

#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <system_error>

#include "ballast/base/error.h"

namespace ballast::monitor {
namespace {

std::string shortest(double value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return {text.data(), end};
}

}  // namespace

MetricsFiles::File MetricsFiles::create(const std::filesystem::path& path) {
  File file{path, {std::fopen(path.c_str(), "we"), {}}};
  if (!file.file)
    throw IoError("monitor.create", "can't write the file (", path.string(), ": ", std::strerror(errno), ")");
  return file;
}

void MetricsFiles::append(const File& to, const std::string& line) {
  const bool written = std::fwrite(line.data(), 1, line.size(), to.file.get()) == line.size();
  if (!written || std::fflush(to.file.get()) != 0)
    throw IoError("monitor.write", "can't write the file (", to.path.string(), ": ", std::strerror(errno), ")");
}

MetricsFiles::MetricsFiles(const std::filesystem::path& folder, std::vector<std::string> columns)
    : columns_(std::move(columns)) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw IoError("monitor.create", "can't create the folder (", folder.string(), ": ", error.message(), ")");
  csv_ = create(folder / "metrics.csv");
  jsonl_ = create(folder / "metrics.jsonl");
  std::string header;
  for (const std::string& column : columns_) header += (header.empty() ? "" : ",") + column;
  append(csv_, header + "\n");
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
