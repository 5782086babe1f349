#include "benchmarks/measure.h"

#include <cstdio>
#include <cstdlib>

namespace ballast::bench {
namespace {

[[noreturn]] void end(int status, const std::string& text) {
  std::fputs(text.c_str(), status == 0 ? stdout : stderr);
  std::exit(status);
}

}  // namespace

Flags::Flags(int argc, char** argv, std::string about) : about_(std::move(about)) {
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--help" || name == "-h") {
      help_ = true;
      return;
    }
    if (!name.starts_with("--") || i + 1 == argc)
      end(2, "flags come as --name value (got " + name + "; --help lists them)\n");
    given_.push_back({name.substr(2), argv[i + 1]});
  }
}

std::string Flags::text(const std::string& name, const std::string& fallback, const std::string& meaning) {
  list_ += "  --" + name + " " + fallback + "\n      " + meaning + "\n";
  for (Given& flag : given_)
    if (flag.name == name) {
      flag.read = true;
      return flag.value;
    }
  return fallback;
}

std::int64_t Flags::number(const std::string& name, std::int64_t fallback, const std::string& meaning) {
  const std::string value = text(name, std::to_string(fallback), meaning);
  char* rest = nullptr;
  const std::int64_t number = std::strtoll(value.c_str(), &rest, 10);
  if (value.empty() || *rest != '\0') end(2, "not a number: --" + name + " " + value + "\n");
  return number;
}

void Flags::finish() {
  if (help_) end(0, about_ + "\n\nFlags, with their defaults:\n" + list_);
  for (const Given& flag : given_)
    if (!flag.read) end(2, "no such flag: --" + flag.name + "\nFlags, with their defaults:\n" + list_);
}

}  // namespace ballast::bench
