#include "ballast/engine/rank_errors.h"

#include <algorithm>
#include <new>
#include <string>
#include <vector>

#include "ballast/base/error.h"

namespace ballast {
namespace {

enum class Kind : std::uint8_t { kNone, kUse, kConfig, kMemory, kIo };
struct Failure {
  Kind kind = Kind::kNone;
  std::string text;
};

Failure failure_of(const std::function<void()>& part) {
  try {
    part();
    return {};
  } catch (const CommError&) {
    throw;
  } catch (const UseError& e) {
    return {Kind::kUse, e.what()};
  } catch (const ConfigError& e) {
    return {Kind::kConfig, e.what()};
  } catch (const MemoryError& e) {
    return {Kind::kMemory, e.what()};
  } catch (const std::bad_alloc& e) {
    return {Kind::kMemory, std::string("[engine.checkpoint] host memory is missing (") + e.what() + ")"};
  } catch (const std::exception& e) {
    return {Kind::kIo, e.what()};
  }
}

[[noreturn]] void rethrow(const Failure& failure) {
  // "[component.operation] what": taken apart, so that the text comes out as it went in.
  std::string operation = "engine.checkpoint", what = failure.text;
  const std::size_t end = failure.text.find("] ");
  if (!failure.text.empty() && failure.text.front() == '[' && end != std::string::npos) {
    operation = failure.text.substr(1, end - 1);
    what = failure.text.substr(end + 2);
  }
  switch (failure.kind) {
    case Kind::kUse:
      throw UseError(operation, what);
    case Kind::kConfig:
      throw ConfigError(operation, what);
    case Kind::kMemory:
      throw MemoryError(operation, what);
    default:
      throw IoError(operation, what);
  }
}

}  // namespace

void together(Rounds& rounds, const std::function<void()>& part) {
  constexpr std::size_t kMostText = 4000;
  Failure mine = failure_of(part);
  mine.text.resize(std::min(mine.text.size(), kMostText));
  const auto all = rounds.exchange({static_cast<double>(mine.kind), static_cast<double>(mine.text.size())});
  double longest = 0;
  std::size_t first = all.size();
  for (std::size_t r = all.size(); r-- > 0;) {
    longest = std::max(longest, all[r][1]);
    if (all[r][0] != 0) first = r;
  }
  if (first == all.size()) return;
  // Texts travel only where there is one: a character a number.
  std::vector<double> letters(static_cast<std::size_t>(longest), 0);
  for (std::size_t i = 0; i < mine.text.size(); ++i) letters[i] = static_cast<unsigned char>(mine.text[i]);
  const auto texts = rounds.exchange(letters);
  Failure failure{static_cast<Kind>(all[first][0]), std::string(static_cast<std::size_t>(all[first][1]), ' ')};
  for (std::size_t i = 0; i < failure.text.size(); ++i) failure.text[i] = static_cast<char>(texts[first][i]);
  rethrow(failure);
}

}  // namespace ballast
