#include "ballast/monitor/metrics.h"

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

std::string shortest(double value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return {text.data(), end};
}

// Whole lines whose first number (behind `skip` characters) is at most `keep`; none where the first line isn't
// `header`.
std::string kept_lines(const std::filesystem::path& path, const std::string& header, std::size_t skip, double keep) {
  std::ifstream file(path, std::ios::binary);
  std::string kept, line;
  if (!header.empty() && (!std::getline(file, line) || line != header)) return kept;
  while (std::getline(file, line) && !file.eof()) {  // a line without an end was torn
    double first = 0;
    const char* const end = line.data() + line.size();
    const bool number = line.size() > skip && std::from_chars(line.data() + skip, end, first).ec == std::errc();
    if (number && first <= keep) kept += line + "\n";
  }
  return kept;
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

MetricsFiles::MetricsFiles(const std::filesystem::path& folder, std::vector<std::string> columns, double keep)
    : columns_(std::move(columns)) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw IoError("monitor.create", "can't create the folder (", folder.string(), ": ", error.message(), ")");
  std::string header;
  for (const std::string& column : columns_) header += (header.empty() ? "" : ",") + column;
  const std::size_t key = columns_.front().size() + std::string("{\"\": ").size();
  const std::string rows = keep < 0 ? "" : kept_lines(folder / "metrics.csv", header, 0, keep);
  const std::string objects = rows.empty() ? "" : kept_lines(folder / "metrics.jsonl", "", key, keep);
  csv_ = create(folder / "metrics.csv");
  jsonl_ = create(folder / "metrics.jsonl");
  append(csv_, header + "\n" + rows);
  append(jsonl_, objects);
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
