#pragma once

#include <chrono>
#include <cstdio>
#include <string>

namespace ballast::monitor {

/// What a run tells its user while it goes on: on a terminal a bar that is redrawn in place at the bottom, in a pipe or
/// a file plain lines. While it lives, log lines come above the bar instead of tearing it. One at a time in a process.
class Progress {
 public:
  /// terminal: does `out` take escape sequences? See is_terminal.
  Progress(std::FILE* out, bool terminal);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();  // end(); log lines go to standard error again

  static bool is_terminal(std::FILE* out);

  /// fraction: done so far, 0 to 1. On a terminal redraws the bar, ten times a second at most. In a pipe prints `text`
  /// as a line where this is a milestone, and nothing otherwise.
  void report(double fraction, const std::string& text, bool milestone);
  /// A line that stays, in both.
  void line(const std::string& text);
  /// Leaves the bar as it stands and goes on below it. The destructor does the same.
  void end();

 private:
  void draw();
  void erase();

  std::FILE* out_;
  bool terminal_, drawn_ = false;
  double fraction_ = 0;
  std::string text_;
  std::chrono::steady_clock::time_point last_draw_{};
};

/// "42 s", "3 min 20 s", "5 h 07 min", "2 d 03 h".
std::string format_duration(double seconds);

}  // namespace ballast::monitor
