#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>

#include "ballast/checkpoint/checkpoint_folder.h"
#include "ballast/checkpoint/safetensors.h"

namespace ballast::ckpt {

/// A checkpoint that is being read: whoever saved it, in parts of any tensor. What is handed out is what was written:
/// every piece that is touched is read whole and compared with its checksum. Memory: a few blocks of each of the last
/// few files. Errors: IoError with the file's name.
class CheckpointReader {
 public:
  /// tag: "" for the latest. Reads the manifest.
  CheckpointReader(const CheckpointFolder& folder, const std::string& tag, Owner owner);

  const std::filesystem::path& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  /// Of the manifest's text: the same where two ranks see the same checkpoint.
  std::string digest() const { return digest_; }
  std::int64_t bytes_read() const { return bytes_read_; }

  /// Elements [begin, end) of a tensor that is stored as `dtype` in these pieces of the manifest.
  void read(const Pieces& pieces, c10::ScalarType dtype, std::int64_t begin, std::int64_t end, std::span<std::byte> to);
  /// All of one file, against the manifest.
  void verify(const FileRecord& file);

 private:
  using Sink = std::function<void(std::int64_t offset, std::span<const std::byte> part)>;
  SafetensorsReader& open(const std::string& file);
  std::uint64_t stream(SafetensorsReader& file, const TensorInfo& tensor, const Sink& sink);
  void expect(const SafetensorsReader& file, const TensorInfo& tensor, std::uint64_t got, std::uint64_t want) const;

  std::filesystem::path path_;
  Owner owner_;
  Manifest manifest_;
  std::string digest_;
  std::unordered_map<std::string, std::unordered_map<std::string, std::uint64_t>> checksums_;  // by file and tensor
  std::unordered_map<std::string, const FileRecord*> files_;
  std::list<std::pair<std::string, std::unique_ptr<SafetensorsReader>>> open_;  // the one used last first
  std::int64_t bytes_read_ = 0;
};

}  // namespace ballast::ckpt
