#include "ballast/checkpoint/checkpoint_folder.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <system_error>
#include <tuple>

#include "ballast/base/checksum.h"
#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/checkpoint/bounded_json.h"

namespace ballast::ckpt {
namespace {

namespace fs = std::filesystem;

// Hidden, so that no tag collides with them.
constexpr const char* kSaving = ".saving-";
constexpr const char* kRemoving = ".removing-";
constexpr const char* kLatest = "latest";
constexpr std::int64_t kMostLatestBytes = 4096, kMostPartBytes = std::int64_t{1} << 28;

std::string part_name(int rank, int world) {
  return fs::path(rank_file_name(rank, world)).replace_extension(".json").string();
}

bool starts_with(const std::string& name, const char* prefix) { return name.rfind(prefix, 0) == 0; }

double seconds(std::chrono::system_clock::time_point since_1970) {
  return std::chrono::duration<double>(since_1970.time_since_epoch()).count();
}

void fill_in(Pieces& pieces, const std::map<std::string, const Part*>& parts) {
  for (Piece& piece : pieces) piece.checksum = parts.at(piece.file)->tensors.at(piece.tensor);
}

}  // namespace

std::string rank_file_name(int rank, int world) {
  char name[64];
  std::snprintf(name, sizeof name, "rank-%05d-of-%05d.safetensors", rank, world);
  return name;
}

bool is_default_tag(const std::string& tag) {
  constexpr const char* kDefault = "global_step";
  const std::size_t digits = std::string(kDefault).size();
  return starts_with(tag, kDefault) && tag.size() > digits &&
         tag.find_first_not_of("0123456789", digits) == std::string::npos;
}

std::string Part::to_text() const {
  nlohmann::json json = {{"name", file.name}, {"bytes", file.bytes}, {"checksum", checksum_text(file.checksum)}};
  json["tensors"] = nlohmann::json::object();
  for (const auto& [name, sum] : tensors) json["tensors"][name] = checksum_text(sum);
  return json.dump();
}

Part Part::from_text(const std::string& text, const std::string& file) {
  const nlohmann::json json = parse_bounded(text, 3, file);
  try {
    const auto sum = [](const nlohmann::json& value) {
      return checksum_of_text(value.get_ref<const std::string&>()).value();
    };
    Part part{{json.at("name"), json.at("bytes"), sum(json.at("checksum"))}, {}};
    for (const auto& [name, value] : json.at("tensors").items()) part.tensors[name] = sum(value);
    return part;
  } catch (const std::exception& e) {
    throw IoError("checkpoint.save", "a rank left a bad record of its file (", file, "; ", e.what(), ")");
  }
}

fs::path CheckpointFolder::unfinished(const std::string& tag) const { return path_ / (kSaving + tag); }

void CheckpointFolder::begin(const std::string& tag) const {
  make_folder(path_, owner_);
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(of(tag), ignored)) && !fs::exists(of(tag) / Manifest::kFile, ignored))
    throw IoError("checkpoint.save", "what is there is no checkpoint, and stays (", of(tag).string(),
                  "; choose another tag, or move it away)");
  if (const auto latest = fs::status(path_ / kLatest, ignored); fs::exists(latest) && !fs::is_regular_file(latest))
    throw IoError("checkpoint.save", "not a file, which would name the newest checkpoint (", (path_ / kLatest).string(),
                  "; move it away, or save into another folder)");
  remove_leftovers();
  make_folder(unfinished(tag), owner_);
}

void CheckpointFolder::remove_leftovers() const {
  for (const std::string& name : list_folder(path_, owner_))
    if (starts_with(name, kSaving) || starts_with(name, kRemoving)) remove_folder(path_ / name, owner_);
}

void CheckpointFolder::leave_part(const std::string& tag, int rank, int world, const Part& part) const {
  write_text(unfinished(tag) / part_name(rank, world), part.to_text(), owner_);
}

std::optional<Part> CheckpointFolder::find_part(const std::string& tag, int rank, int world) const {
  const fs::path path = unfinished(tag) / part_name(rank, world);
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return std::nullopt;
  return Part::from_text(read_text(path, kMostPartBytes, owner_), path.string());
}

void CheckpointFolder::commit(Manifest manifest, const std::vector<Part>& parts, int keep_last) const {
  manifest.saved = seconds(std::chrono::system_clock::now());
  std::map<std::string, const Part*> by_file;
  for (const Part& part : parts) {
    manifest.files.push_back(part.file);
    by_file[part.file.name] = &part;
  }
  for (ParameterRecord& parameter : manifest.parameters)
    for (auto& [key, pieces] : parameter.states) fill_in(pieces, by_file);
  for (BufferRecord& buffer : manifest.buffers) fill_in(buffer.pieces, by_file);
  for (auto& generators : manifest.rng)
    for (auto& [name, piece] : generators) piece.checksum = by_file.at(piece.file)->tensors.at(piece.tensor);

  const std::string& tag = manifest.tag;
  const fs::path beside = unfinished(tag);
  for (std::size_t rank = 0; rank < parts.size(); ++rank)
    remove_folder(beside / part_name(static_cast<int>(rank), static_cast<int>(parts.size())), owner_);
  write_text(beside / Manifest::kFile, manifest.to_text(), owner_);
  sync_folder(beside, owner_);
  move_into_place(beside, of(tag), owner_);
  sync_folder(path_, owner_);
  write_text(path_ / kLatest, tag, owner_);
  sync_folder(path_, owner_);
  retain(keep_last, manifest);
}

// The checkpoint stands; what fails from here on costs space, not the save.
void CheckpointFolder::retain(int keep_last, const Manifest& saved) const {
  try {
    remove_folder(unfinished(saved.tag), owner_);  // the one that was replaced
    if (keep_last <= 0) return;
    std::vector<std::string> old;
    for (Found& one : found())  // one that can't be read is nobody's to remove
      if (is_default_tag(one.tag) && one.tag != saved.tag && one.run == saved.run) old.push_back(std::move(one.tag));
    const std::size_t kept = static_cast<std::size_t>(keep_last) - (is_default_tag(saved.tag) ? 1 : 0);
    for (std::size_t i = 0; i + kept < old.size(); ++i) remove_checkpoint(old[i]);
  } catch (const IoError& e) {
    log_warning("an old checkpoint could not be removed: ", e.what());
  }
}

// Renamed first: a half of it must not look like a checkpoint.
void CheckpointFolder::remove_checkpoint(const std::string& tag) const {
  const fs::path doomed = path_ / (kRemoving + tag);
  rename_folder(of(tag), doomed, owner_);
  remove_folder(doomed, owner_);
}

void CheckpointFolder::abandon(const std::string& tag) const noexcept {
  try {
    remove_folder(unfinished(tag), owner_);
  } catch (const std::exception& e) {
    log_warning("an unfinished checkpoint could not be removed: ", e.what());
  }
}

std::string CheckpointFolder::latest() const {
  std::error_code ignored;
  if (!fs::exists(path_ / kLatest, ignored))
    throw IoError("checkpoint.load", "there is no checkpoint to go on from (", (path_ / kLatest).string(),
                  " is missing; name the folder that was saved into, or a tag in it)");
  std::string tag = read_text(path_ / kLatest, kMostLatestBytes, owner_);
  while (!tag.empty() && (tag.back() == '\n' || tag.back() == '\r' || tag.back() == ' ')) tag.pop_back();
  if (!is_plain_name(tag))
    throw IoError("checkpoint.load", "the file names no checkpoint (", (path_ / kLatest).string(), "; name a tag)");
  return tag;
}

std::vector<CheckpointFolder::Found> CheckpointFolder::found() const {
  std::vector<Found> found;
  for (const std::string& name : list_folder(path_, owner_)) {
    const fs::path path = of(name) / Manifest::kFile;
    std::error_code error;
    const auto when = fs::last_write_time(path, error);
    if (!is_plain_name(name) || error) continue;
    Found& one = found.emplace_back(Found{seconds(std::chrono::file_clock::to_sys(when)), name, std::nullopt});
    try {
      const Manifest manifest = Manifest::from_text(read_text(path, Manifest::kMostBytes, owner_), path.string());
      if (manifest.saved > 0) one.saved = manifest.saved;
      one.run = manifest.run;
    } catch (const IoError&) {  // whoever loads it is told
    }
  }
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return std::tuple(a.saved, a.tag.size(), a.tag) < std::tuple(b.saved, b.tag.size(), b.tag);
  });
  return found;
}

std::vector<std::string> CheckpointFolder::tags() const {
  std::vector<std::string> tags;
  for (Found& one : found()) tags.push_back(std::move(one.tag));
  return tags;
}

}  // namespace ballast::ckpt
