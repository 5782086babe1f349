#include "ballast/base/log.h"

#include <cstdio>
#include <mutex>

namespace ballast {
namespace {

std::mutex mutex;  // guards sink, and keeps the lines of ranks that are threads of one process apart
LogSink sink;

}  // namespace

void set_log_sink(LogSink to) {
  std::lock_guard lock(mutex);
  sink = std::move(to);
}

void log_line(LogLevel level, const std::string& line) {
  std::lock_guard lock(mutex);
  sink ? sink(level, line) : print_log_line(level, line);
}

void print_log_line(LogLevel level, const std::string& line) {
  std::fprintf(stderr, "ballast: %s%s\n", level == LogLevel::kWarning ? "warning: " : "", line.c_str());
}

}  // namespace ballast
