#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ballast::monitor {

/// Where a run goes on: behind the row whose first cell is `key`, and that this cell tells from other runs' rows.
struct MetricsPoint {
  double key = 0;
  std::string column;
  double value = 0;
};

/// One row of numbers a step, in two forms: metrics.csv for spreadsheets and pandas, metrics.jsonl (one JSON object a
/// line, without the cells that a row lacks) for everything else. A row is on disk's way when write() returns, so a run
/// that is killed keeps what it had. Numbers are written with as few digits as read back to the same value.
class MetricsFiles {
 public:
  /// Creates the folder where it is missing, and replaces the files of an earlier run. Throws IoError (path, reason).
  /// from: keeps their rows up to that point. Where these don't lead there (other columns, a gap, another run's), the
  /// earlier files stay beside, with ".old" behind their names.
  MetricsFiles(const std::filesystem::path& folder, std::vector<std::string> columns,
               const std::optional<MetricsPoint>& from = std::nullopt);

  std::int64_t rows_kept() const noexcept { return kept_; }
  std::int64_t rows_cut() const noexcept { return cut_; }  // behind the point that they lead to
  bool put_aside() const noexcept { return put_aside_; }   // as ".old"

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
  std::string take_up(const std::filesystem::path& csv, const std::string& header, const MetricsPoint& from);
  static File create(const std::filesystem::path& path);
  static void append(const File& to, const std::string& line);

  std::vector<std::string> columns_;
  std::int64_t kept_ = 0, cut_ = 0;
  bool put_aside_ = false;
  File csv_, jsonl_;
};

}  // namespace ballast::monitor
