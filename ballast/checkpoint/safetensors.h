#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ballast/base/checksum.h"
#include "ballast/checkpoint/storage.h"

// The safetensors format (https://github.com/huggingface/safetensors): 8 bytes little-endian n, n bytes of JSON (name
// to dtype, shape and data_offsets, "__metadata__" to texts), data. Ours pads the JSON with spaces to whole pages.

namespace ballast::ckpt {

struct TensorSpec {
  std::string name;
  c10::ScalarType dtype = c10::kFloat;
  std::vector<std::int64_t> shape;
};

/// A tensor of a file: bytes [begin, end) of its data.
struct TensorInfo : TensorSpec {
  std::int64_t numel = 0;
  std::int64_t begin = 0, end = 0;
};

using Metadata = std::map<std::string, std::string>;

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // in the order of their data
  Metadata metadata;
};

/// Bytes that a header may have: the limit of the format's own library.
inline constexpr std::int64_t kMostHeaderBytes = 100'000'000;

/// Reads a header, its length not included. data_bytes: what follows it in the file. IoError with the file's name
/// unless every tensor has a known dtype and as many bytes as its shape says, and the tensors fill the data without gap
/// or overlap. Takes memory in proportion to the text alone.
SafetensorsHeader parse_header(std::string_view json, std::int64_t data_bytes, const std::string& file);

/// Writes a file whose tensors are known ahead.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorSpec> tensors, const Metadata& metadata,
                    Owner owner);

  /// The tensors' data one after the other, cut in any way.
  void append(std::span<const std::byte> data);

  struct Digest {
    std::int64_t bytes = 0;
    std::uint64_t checksum = 0;          // file_checksum
    std::vector<std::uint64_t> tensors;  // checksum of each one's data
  };
  /// All data is there, and durable when this returns.
  Digest finish();

 private:
  void close_tensors();

  std::vector<TensorSpec> tensors_;
  std::vector<std::int64_t> ends_;  // of each tensor's data
  std::string header_;
  OutputFile file_;
  std::int64_t written_ = 0;  // of the data
  Checksum current_;
  std::vector<std::uint64_t> checksums_;
};

/// Reads tensors of a file, or parts of them, into memory of the caller. IoError as parse_header and InputFile.
class SafetensorsReader {
 public:
  SafetensorsReader(const std::filesystem::path& path, Owner owner);

  const std::filesystem::path& path() const { return file_.path(); }
  const SafetensorsHeader& header() const { return header_; }
  std::int64_t bytes() const { return file_.bytes(); }
  /// IoError where there is none of this name.
  const TensorInfo& find(const std::string& name) const;
  /// Elements from `first` on, as many as `to` has room for.
  void read(const TensorInfo& tensor, std::int64_t first, std::span<std::byte> to);
  /// Where its data begins in the file.
  std::int64_t place(const TensorInfo& tensor) const { return static_cast<std::int64_t>(text_.size()) + tensor.begin; }
  /// As InputFile's.
  void read_pages(std::int64_t offset, std::span<std::byte> to, std::int64_t least) const {
    file_.read_pages(offset, to, least);
  }
  /// Of the file, given those of its tensors in the order of their data.
  std::uint64_t checksum(std::span<const std::uint64_t> tensors) const;

 private:
  InputFile file_;
  Owner owner_;
  std::string text_;  // of the header, its length included
  SafetensorsHeader header_;
  std::unordered_map<std::string, std::size_t> by_name_;
};

/// A file's checksum: of its first bytes up to the data, followed by the checksums of its tensors' data, 8 bytes
/// little-endian each. So it covers every byte, and a part can be checked without the rest.
std::uint64_t file_checksum(std::string_view header, std::span<const std::uint64_t> tensors);

}  // namespace ballast::ckpt
