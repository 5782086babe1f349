#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "ballast/checkpoint/manifest.h"
#include "ballast/checkpoint/storage.h"

namespace ballast::ckpt {

/// What one rank has written, as it leaves it beside its file for rank 0: small enough to be written last and at once,
/// so that its presence says that the rank's data is durable.
struct Part {
  FileRecord file;
  std::map<std::string, std::uint64_t> tensors;  // checksums of their data

  std::string to_text() const;
  static Part from_text(const std::string& text, const std::string& file);
};

std::string rank_file_name(int rank, int world);  // "rank-00002-of-00008.safetensors"

/// Is it a name that saves give without being told one: "global_step17"?
bool is_default_tag(const std::string& tag);

/// The folder that holds a run's checkpoints, each a folder of its tag, and `latest`, which names one of them. A
/// checkpoint is written under another name beside and appears whole: whatever fails, and whenever, the ones that were
/// there stay as they are, and `latest` on one of them. One run at a time saves into a folder. Errors: IoError.
class CheckpointFolder {
 public:
  CheckpointFolder(std::filesystem::path path, Owner owner) : path_(std::move(path)), owner_(owner) {}

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path of(const std::string& tag) const { return path_ / tag; }
  /// Where ranks write a checkpoint that isn't complete yet.
  std::filesystem::path unfinished(const std::string& tag) const;

  /// Rank 0, before anybody writes: removes what saves that didn't get to their end left behind, and makes
  /// unfinished(tag).
  void begin(const std::string& tag) const;
  /// Any rank, when its file is durable.
  void leave_part(const std::string& tag, int rank, int world, const Part& part) const;
  /// Rank 0: that rank's, if it is there.
  std::optional<Part> find_part(const std::string& tag, int rank, int world) const;
  /// Rank 0, with all parts: completes the manifest's checksums and files, makes the checkpoint appear and `latest`
  /// name it. Then removes this run's checkpoints with names like the default ("global_step17") but the `keep_last`
  /// saved last (0: none are removed); what can't be removed is a line in the log.
  void commit(Manifest manifest, const std::vector<Part>& parts, int keep_last) const;
  /// Rank 0, of a save that failed: removes what it left, as far as that is possible.
  void abandon(const std::string& tag) const noexcept;

  /// The tag that `latest` names. IoError where there is none.
  std::string latest() const;
  /// Tags of the checkpoints in the folder, the one saved last at the end, by their manifests; those that don't say
  /// when, or can't be read, by the time of the manifest's file.
  std::vector<std::string> tags() const;

 private:
  struct Found {
    double saved;  // seconds since 1970
    std::string tag;
    std::optional<std::string> run;  // none: its manifest can't be read
  };
  std::vector<Found> found() const;  // in the order of tags()
  void remove_leftovers() const;
  void retain(int keep_last, const Manifest& saved) const;
  void remove_checkpoint(const std::string& tag) const;

  std::filesystem::path path_;
  Owner owner_;
};

}  // namespace ballast::ckpt
