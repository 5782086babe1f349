#pragma once

#include <filesystem>
#include <string>

/// What fuzz programs share: a driver, and places to write to.
namespace ballast::fuzz {

/// Of the program: gives one input to the reader that it is for, and returns whether that took it for good. A reader
/// may only return, or throw an error that names the file.
bool take(const std::string& input);

/// Ends the process with a core: a finding.
[[noreturn]] void give_up(const std::string& what);
/// A folder of this process, in memory where the system has that.
const std::filesystem::path& scratch();
void write(const std::filesystem::path& path, const std::string& text);
/// false; gives up where the message names nothing like `name`.
bool refused_by_name(const std::string& message, const std::string& name);

}  // namespace ballast::fuzz
