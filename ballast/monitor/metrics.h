#pragma once

#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ballast::monitor {

/// One row of numbers a step, in two forms: metrics.csv for spreadsheets and pandas, metrics.jsonl (one JSON object a
/// line, without the cells that a row lacks) for everything else. A row is on disk's way when write() returns, so a run
/// that is killed keeps what it had. Numbers are written with as few digits as read back to the same value.
class MetricsFiles {
 public:
  /// Creates the folder where it is missing, and replaces the files of an earlier run, of which the rows stay whose
  /// first cell is at most `keep`, if it had the same columns. Throws IoError (path, reason).
  MetricsFiles(const std::filesystem::path& folder, std::vector<std::string> columns, double keep = -1);

  /// row: as many cells as columns. A cell without a value is empty in the CSV; so are NaN and infinities, which are
  /// null in the JSON. Throws UseError (another number of cells), IoError (disk full: path, reason).
  void write(const std::vector<std::optional<double>>& row);

  const std::filesystem::path& csv() const noexcept { return csv_.path; }
  const std::filesystem::path& jsonl() const noexcept { return jsonl_.path; }

 private:
  struct Close {
    void operator()(std::FILE* file) const noexcept { std::fclose(file); }
  };
  struct File {
    std::filesystem::path path;
    std::unique_ptr<std::FILE, Close> file;
  };
  static File create(const std::filesystem::path& path);
  static void append(const File& to, const std::string& line);

  std::vector<std::string> columns_;
  File csv_, jsonl_;
};

}  // namespace ballast::monitor
