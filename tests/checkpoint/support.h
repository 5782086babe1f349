#pragma once

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "ballast/base/error.h"
#include "ballast/base/remove_tree.h"
#include "ballast/checkpoint/checkpoint_folder.h"
#include "ballast/checkpoint/checkpoint_reader.h"
#include "ballast/checkpoint/safetensors.h"

namespace ballast::ckpt {

/// A fresh folder, removed at the end: below the system's temporary one, or in memory where the system has that, for
/// tests that wait for a thousand files to be durable.
class TestFolder {
 public:
  enum class On { kDisk, kMemory };
  explicit TestFolder(On on = On::kDisk) {
    static int made = 0;
    const bool in_memory = on == On::kMemory && ::access("/dev/shm", W_OK) == 0;
    path_ = (in_memory ? std::filesystem::path("/dev/shm") : std::filesystem::temp_directory_path()) /
            ("ballast-checkpoint-test-" + std::to_string(getpid()) + "-" + std::to_string(made++));
    std::filesystem::create_directories(path_);
  }
  ~TestFolder() { remove_tree(path_); }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

inline std::vector<std::byte> some_bytes(std::size_t n, int seed = 1) {
  std::vector<std::byte> made(n);
  for (std::size_t i = 0; i < n; ++i) made[i] = static_cast<std::byte>(seed + i * 31 + i / 251);
  return made;
}

template <class Fn>
std::string error_of(Fn&& fn) {
  try {
    fn();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

inline constexpr std::int64_t kSmallNumel = 10;

/// One parameter "p" of ten elements, `value` each, as `world` ranks would save it.
inline Manifest small_manifest(const std::string& tag, int world, const std::string& run = "a run") {
  Manifest manifest;
  manifest.tag = tag;
  manifest.run = run;
  manifest.world = world;
  manifest.compute_dtype = "fp32";
  manifest.optimizer = "Adam";
  manifest.lr = {0.1};
  ParameterRecord p;
  p.names = {"p", "tied.p"};
  p.shape = {2, 5};
  p.numel = kSmallNumel;
  for (int rank = 0; rank < world; ++rank)
    p.states["master"].push_back(
        {rank_file_name(rank, world), "master/p", rank * kSmallNumel / world, (rank + 1) * kSmallNumel / world, 0});
  manifest.parameters.push_back(p);
  return manifest;
}

inline void save_rank(const CheckpointFolder& folder, const std::string& tag, int rank, int world, float value) {
  const Manifest manifest = small_manifest(tag, world);
  const Piece& piece = manifest.parameters[0].states.at("master")[static_cast<std::size_t>(rank)];
  const std::vector<float> data(static_cast<std::size_t>(piece.end - piece.begin), value);
  SafetensorsWriter writer(folder.unfinished(tag) / piece.file,
                           {{piece.tensor, c10::kFloat, {static_cast<std::int64_t>(data.size())}}}, {}, {rank});
  writer.append(std::as_bytes(std::span(data)));
  const auto digest = writer.finish();
  folder.leave_part(tag, rank, world,
                    {{piece.file, digest.bytes, digest.checksum}, {{piece.tensor, digest.tensors[0]}}});
}

/// The whole save, with the ranks' parts one after the other.
inline void save_small(const std::filesystem::path& path, const std::string& tag, float value, int keep_last = 0,
                       int world = 2, const std::string& run = "a run") {
  const CheckpointFolder folder(path, {0});
  folder.begin(tag);
  for (int rank = 0; rank < world; ++rank) save_rank(folder, tag, rank, world, value);
  std::vector<Part> parts;
  for (int rank = 0; rank < world; ++rank) parts.push_back(folder.find_part(tag, rank, world).value());
  folder.commit(small_manifest(tag, world, run), parts, keep_last);
}

/// What a load of it gives: one value ten times, or an exception.
inline float load_small(const std::filesystem::path& path, const std::string& tag = "") {
  CheckpointReader reader(CheckpointFolder(path, {0}), tag, {0});
  std::vector<float> data(kSmallNumel, -1);
  reader.read(reader.manifest().parameters.at(0).states.at("master"), c10::kFloat, 0, kSmallNumel,
              std::as_writable_bytes(std::span(data)));
  for (const float value : data)
    if (value != data.front()) throw UseError("test.load", "mixed values (", value, " and ", data.front(), ")");
  return data.front();
}

}  // namespace ballast::ckpt
