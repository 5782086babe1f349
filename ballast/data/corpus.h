#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "ballast/data/mapped_file.h"

namespace ballast::data {

/// How a file's bytes are read as tokens. The wide ones are little-endian, without a header.
enum class TokenFormat : std::uint8_t { kByte, kUInt16, kUInt32 };

struct CorpusOptions {
  std::filesystem::path path;  // a file, or a folder that is searched recursively
  TokenFormat format = TokenFormat::kByte;
  std::vector<std::string> extensions;  // ".py": only these files of a folder; none: all of them
  bool allow_binary = false;            // take files of bytes that don't look like text
};

/// The tokens of one or many memory-mapped files, as one sequence: the files in byte order of their paths below the
/// folder, joined without a separator. Equal on every machine that has the same files. Empty files are left out.
class Corpus {
 public:
  /// Throws IoError: nothing there, nothing in it, unreadable, not a whole number of tokens, or binary (a zero byte in
  /// the first 64 KiB of a file that is read as text) unless that is allowed.
  static Corpus open(const CorpusOptions& options);

  std::int64_t size() const noexcept { return starts_.back(); }  // tokens
  std::int64_t files() const noexcept { return static_cast<std::int64_t>(files_.size()); }
  TokenFormat format() const noexcept { return format_; }
  const std::filesystem::path& path() const noexcept { return path_; }

  /// Tokens [begin, begin + out.size()). Throws UseError where that leaves the corpus.
  void read(std::int64_t begin, std::span<std::int64_t> out) const;

  /// The file that holds this token and the token's place in it: "torch/nn/functional.py, token 1042".
  std::string describe(std::int64_t token) const;

 private:
  Corpus() = default;

  std::filesystem::path path_;
  TokenFormat format_ = TokenFormat::kByte;
  std::vector<MappedFile> files_;
  std::vector<std::int64_t> starts_;  // first token of each file, and behind the last one the size
};

/// Entropy of the corpus in bits a token if every token were drawn on its own: sum over tokens of -p log2 p (Shannon,
/// 1948). What a model must beat to have learned anything about order. Reads everything once.
double order0_entropy(const Corpus& corpus);

}  // namespace ballast::data
