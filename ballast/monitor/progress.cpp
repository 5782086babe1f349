#include "ballast/monitor/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "ballast/base/log.h"

namespace ballast::monitor {
namespace {

constexpr int kBarWidth = 16;
constexpr std::chrono::milliseconds kRedrawEvery{100};

std::size_t columns_of(std::FILE* out) {
  winsize size{};
  if (::ioctl(::fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

}  // namespace

Progress::Progress(std::FILE* out, bool terminal) : out_(out), terminal_(terminal) {
  set_log_sink([this](LogLevel level, const std::string& text) {
    line((level == LogLevel::kWarning ? "warning: " : "") + text);
  });
}

Progress::~Progress() {
  set_log_sink({});
  end();
}

void Progress::end() {
  if (!drawn_) return;
  draw();  // with what report() held back
  std::fputc('\n', out_);
  std::fflush(out_);
  drawn_ = false;
}

bool Progress::is_terminal(std::FILE* out) {
  const char* kind = std::getenv("TERM");
  return ::isatty(::fileno(out)) && !(kind && std::strcmp(kind, "dumb") == 0);
}

void Progress::report(double fraction, const std::string& text, bool milestone) {
  fraction_ = std::clamp(fraction, 0.0, 1.0);
  text_ = text;
  if (terminal_) {
    const auto now = std::chrono::steady_clock::now();
    if (drawn_ && now - last_draw_ < kRedrawEvery) return;
    last_draw_ = now;
    draw();
  } else if (milestone) {
    std::fprintf(out_, "%s\n", text.c_str());
    std::fflush(out_);
  }
}

void Progress::line(const std::string& text) {
  const bool redraw = drawn_;
  erase();
  std::fprintf(out_, "%s\n", text.c_str());
  if (redraw) draw();
  std::fflush(out_);
}

void Progress::draw() {
  const int full = static_cast<int>(std::lround(fraction_ * kBarWidth));
  std::string shown = "[";
  shown.append(full, '#').append(kBarWidth - full, '.').append("] ");
  std::array<char, 8> percent{};
  std::snprintf(percent.data(), percent.size(), "%3.0f%% ", std::floor(fraction_ * 100));
  // One column less than the terminal has: a full line would wrap, and the next redraw would not reach its start.
  shown.append(percent.data()).append(text_);
  shown.resize(std::min(shown.size(), columns_of(out_) - 1));
  std::fprintf(out_, "\r\x1b[K%s", shown.c_str());
  std::fflush(out_);
  drawn_ = true;
}

void Progress::erase() {
  if (drawn_) std::fputs("\r\x1b[K", out_);
  drawn_ = false;
}

std::string format_duration(double seconds) {
  const auto whole = static_cast<long>(std::llround(std::max(0.0, seconds)));
  std::array<char, 48> text{};
  if (whole < 60) {
    std::snprintf(text.data(), text.size(), "%ld s", whole);
  } else if (whole < 3600) {
    std::snprintf(text.data(), text.size(), "%ld min %02ld s", whole / 60, whole % 60);
  } else if (whole < 86400) {
    std::snprintf(text.data(), text.size(), "%ld h %02ld min", whole / 3600, whole % 3600 / 60);
  } else {
    std::snprintf(text.data(), text.size(), "%ld d %02ld h", whole / 86400, whole % 86400 / 3600);
  }
  return text.data();
}

}  // namespace ballast::monitor
