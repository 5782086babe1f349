#pragma once

namespace ballast::cli {

/// From now on SIGINT and SIGTERM ask for an end after the running step instead of killing the process. A second one
/// ends it at once; within two seconds of the first it counts as the same, since a launcher passes on what the terminal
/// has sent already.
void catch_interrupts();

bool interrupted() noexcept;
/// As the first signal does.
void ask_for_an_end() noexcept;

}  // namespace ballast::cli
