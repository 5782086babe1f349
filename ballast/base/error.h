#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace ballast {

/// Base of everything that Ballast throws. The text has the form `[component.operation] what (values)`; docs/errors.md
/// lists the classes, what each leaves behind and what a caller may recover from.
class Error : public std::runtime_error {
 public:
  /// operation: "component.operation". parts: streamed one after the other behind it.
  template <class... Parts>
  explicit Error(const std::string& operation, const Parts&... parts) : std::runtime_error(text(operation, parts...)) {}

 private:
  template <class... Parts>
  static std::string text(const std::string& operation, const Parts&... parts) {
    std::ostringstream out;
    out << '[' << operation << "] ";
    (out << ... << parts);
    return out.str();
  }
};

/// The configuration is wrong: key path, value, what is allowed. Nothing has been allocated or changed.
class ConfigError : public Error {
  using Error::Error;
};
/// A call in a state or with an argument that doesn't allow it. Nothing has been changed.
class UseError : public Error {
  using Error::Error;
};
/// A file or disk operation failed: operation, path, errno text, remedy.
class IoError : public Error {
  using Error::Error;
};
/// Memory is missing: bytes wanted and had, by kind.
class MemoryError : public Error {
  using Error::Error;
};
/// Ranks diverged, a peer died or a collective timed out. The engine can't go on; end the process.
class CommError : public Error {
  using Error::Error;
};

/// Throws E with both values unless got == want. Each side is evaluated once, by the caller.
///   check_eq<IoError>("tiers.finish", "short read", got, want, "bytes; chunk ", chunk, ", ", path);
///   [tiers.finish] short read (got 1048576, want 4194304 bytes; chunk 17, /nvme/run-8f2c/swap.3)
template <class E, class Got, class Want, class... Parts>
void check_eq(const char* operation, const char* what, const Got& got, const Want& want, const Parts&... parts) {
  const char* const space = sizeof...(parts) == 0 ? "" : " ";
  if (!(got == want)) throw E(operation, what, " (got ", got, ", want ", want, space, parts..., ")");
}

}  // namespace ballast
