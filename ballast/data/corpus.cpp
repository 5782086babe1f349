#include "ballast/data/corpus.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <system_error>
#include <unordered_map>

#include "ballast/base/error.h"

namespace ballast::data {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kTextProbe = 64 << 10;

std::size_t token_bytes(TokenFormat format) {
  constexpr std::array<std::size_t, 3> kBytes{1, 2, 4};
  return kBytes[static_cast<std::size_t>(format)];
}

std::int64_t token_at(const std::byte* start, std::int64_t index, TokenFormat format) {
  const auto value = [&]<class T>(T) {
    T token;  // a file may start at any address, and its tokens with it
    std::memcpy(&token, start + static_cast<std::size_t>(index) * sizeof(T), sizeof(T));
    return static_cast<std::int64_t>(token);
  };
  switch (format) {
    case TokenFormat::kUInt16:
      return value(std::uint16_t{});
    case TokenFormat::kUInt32:
      return value(std::uint32_t{});
    default:
      return value(std::uint8_t{});
  }
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

/// Which other files the folder holds, for a message: "12 files, most of them .cpp".
std::string census(const std::map<std::string, int>& extensions) {
  int total = 0;
  const std::pair<const std::string, int>* most = nullptr;
  for (const auto& entry : extensions) {
    total += entry.second;
    if (!most || entry.second > most->second) most = &entry;
  }
  if (total == 0) return "it holds no files";
  return "it holds " + std::to_string(total) + (total == 1 ? " file" : " files") + ", most often " +
         (most->first.empty() ? "without an extension" : most->first);
}

std::vector<fs::path> files_below(const CorpusOptions& options) {
  std::vector<fs::path> found;
  std::map<std::string, int> others;
  std::error_code error;
  fs::path at = options.path;
  fs::recursive_directory_iterator entry(options.path, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    at = entry->path();
    if (!entry->is_regular_file(error)) {
      error.clear();  // a dangling link, or gone since: not a file of the corpus
      continue;
    }
    const std::string extension = at.extension().string();
    if (options.extensions.empty() ||
        std::find(options.extensions.begin(), options.extensions.end(), extension) != options.extensions.end())
      found.push_back(at);
    else
      ++others[extension];
  }
  if (error) throw IoError("data.open", "can't read the folder (", at.string(), ": ", error.message(), ")");
  if (found.empty())
    throw IoError("data.open", "no files to read in the folder (", options.path.string(),
                  options.extensions.empty() ? "" : ", extensions " + join(options.extensions), "; ", census(others),
                  ")");
  std::sort(found.begin(), found.end(), [](const fs::path& a, const fs::path& b) { return a.native() < b.native(); });
  return found;
}

void check_content(const MappedFile& file, const CorpusOptions& options) {
  const auto bytes = file.bytes();
  if (options.format != TokenFormat::kByte) {
    const std::size_t width = token_bytes(options.format);
    if (bytes.size() % width != 0)
      throw IoError("data.open", "not a whole number of tokens (", file.path().string(), ", ", bytes.size(), " bytes, ",
                    width, " bytes a token)");
    return;
  }
  if (options.allow_binary) return;
  const auto probe = bytes.first(std::min(bytes.size(), kTextProbe));
  const auto zero = std::find(probe.begin(), probe.end(), std::byte{0});
  if (zero != probe.end())
    throw IoError("data.open", "not text: byte ", zero - probe.begin(), " is zero (", file.path().string(), ", ",
                  bytes.size(),
                  " bytes; choose files by extension, in a run file data.extensions, or allow binary ones: "
                  "data.allow_binary)");
}

}  // namespace

Corpus Corpus::open(const CorpusOptions& options) {
  std::error_code error;
  const fs::file_status status = fs::status(options.path, error);
  if (!fs::exists(status))
    throw IoError("data.open", "nothing there (", options.path.string(), ": ",
                  error ? error.message() : "No such file or directory", ")");
  Corpus corpus;
  corpus.path_ = options.path;
  corpus.format_ = options.format;
  corpus.starts_.push_back(0);
  const bool folder = fs::is_directory(status);
  for (const fs::path& path : folder ? files_below(options) : std::vector<fs::path>{options.path}) {
    MappedFile file(path);
    if (file.bytes().empty()) continue;
    check_content(file, options);
    const auto tokens = static_cast<std::int64_t>(file.bytes().size() / token_bytes(options.format));
    corpus.starts_.push_back(corpus.starts_.back() + tokens);
    corpus.files_.push_back(std::move(file));
  }
  if (corpus.files_.empty())
    throw IoError("data.open", folder ? "all files of the folder are empty (" : "the file is empty (",
                  options.path.string(), ", 0 bytes)");
  return corpus;
}

void Corpus::read(std::int64_t begin, std::span<std::int64_t> out) const {
  const auto count = static_cast<std::int64_t>(out.size());
  if (begin < 0 || begin + count > size())
    throw UseError("data.read", "outside the corpus (tokens ", begin, " to ", begin + count, " of ", size(), ")");
  auto file = static_cast<std::size_t>(std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin() - 1);
  std::int64_t done = 0;
  while (done < count) {
    const std::int64_t first = begin + done - starts_[file];
    const std::int64_t here = std::min(count - done, starts_[file + 1] - starts_[file] - first);
    const std::byte* start = files_[file].bytes().data();
    for (std::int64_t i = 0; i < here; ++i)
      out[static_cast<std::size_t>(done + i)] = token_at(start, first + i, format_);
    done += here;
    ++file;
  }
}

std::string Corpus::describe(std::int64_t token) const {
  const auto file = std::upper_bound(starts_.begin(), starts_.end() - 1, token) - starts_.begin() - 1;
  return files_[static_cast<std::size_t>(file)].path().string() + ", token " +
         std::to_string(token - starts_[static_cast<std::size_t>(file)]);
}

double order0_entropy(const Corpus& corpus) {
  constexpr std::int64_t kStretch = 1 << 16;
  std::array<std::int64_t, 256> bytes{};
  std::unordered_map<std::int64_t, std::int64_t> wide;
  std::vector<std::int64_t> tokens;
  for (std::int64_t begin = 0; begin < corpus.size(); begin += kStretch) {
    tokens.resize(static_cast<std::size_t>(std::min(kStretch, corpus.size() - begin)));
    corpus.read(begin, tokens);
    if (corpus.format() == TokenFormat::kByte) {
      for (const std::int64_t token : tokens) ++bytes[static_cast<std::size_t>(token)];
    } else {
      for (const std::int64_t token : tokens) ++wide[token];
    }
  }
  double bits = 0;
  const auto add = [&](std::int64_t count) {
    const double p = static_cast<double>(count) / static_cast<double>(corpus.size());
    if (count > 0) bits -= p * std::log2(p);
  };
  for (const std::int64_t count : bytes) add(count);
  for (const auto& [token, count] : wide) add(count);
  return bits;
}

}  // namespace ballast::data
