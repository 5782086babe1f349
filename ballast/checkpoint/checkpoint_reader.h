#pragma once

#include <list>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "ballast/checkpoint/checkpoint_folder.h"
#include "ballast/checkpoint/tensor_reads.h"

namespace ballast::ckpt {

/// A checkpoint that is being read: whoever saved it, in parts of any tensor. What is handed out is what was written:
/// every piece that is touched is read whole and compared with its checksum. Memory: a few blocks, and the headers of a
/// few files. Errors: IoError with the file's name.
class CheckpointReader {
 public:
  /// tag: "" for the latest. Reads the manifest.
  CheckpointReader(const CheckpointFolder& folder, const std::string& tag, Owner owner);

  const std::filesystem::path& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  /// Of the manifest's text: the same where two ranks see the same checkpoint.
  std::string digest() const { return digest_; }

  /// Elements [begin, end) of a tensor that is stored as `dtype` in these pieces of the manifest.
  void read(const Pieces& pieces, c10::ScalarType dtype, std::int64_t begin, std::int64_t end, std::span<std::byte> to);
  /// The same, together with all that was asked for so, until complete() returns: what lies side by side is read side
  /// by side.
  void read_later(const Pieces& pieces, c10::ScalarType dtype, std::int64_t begin, std::int64_t end,
                  std::span<std::byte> to);
  void complete();
  /// All of one file, against the manifest.
  void verify(const FileRecord& file);

 private:
  std::shared_ptr<SafetensorsReader> open(const std::string& file);
  void add(TensorRead read);

  std::filesystem::path path_;
  Owner owner_;
  Manifest manifest_;
  std::string digest_;
  std::unordered_map<std::string, std::unordered_map<std::string, std::uint64_t>> checksums_;  // by file and tensor
  std::unordered_map<std::string, const FileRecord*> files_;
  std::list<std::pair<std::string, std::shared_ptr<SafetensorsReader>>> open_;  // the one used last first
  std::vector<TensorRead> later_;
  std::set<const SafetensorsReader*> files_later_;  // of those
};

}  // namespace ballast::ckpt
