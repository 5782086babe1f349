#pragma once

#include <functional>
#include <sstream>
#include <string>

namespace ballast {

enum class LogLevel { kInfo, kWarning };

/// Where log lines go: standard error until a caller sets another sink (a test that reads them, a progress bar that
/// must not be torn). Thread-safe; a line arrives whole. An empty function restores standard error.
using LogSink = std::function<void(LogLevel, const std::string& line)>;
void set_log_sink(LogSink sink);
void log_line(LogLevel level, const std::string& line);
/// To standard error, as without a sink: for sinks that only change the text.
void print_log_line(LogLevel level, const std::string& line);

template <class... Parts>
void log_info(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  log_line(LogLevel::kInfo, out.str());
}

template <class... Parts>
void log_warning(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  log_line(LogLevel::kWarning, out.str());
}

}  // namespace ballast
