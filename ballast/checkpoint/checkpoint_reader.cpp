#include "ballast/checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "ballast/base/error.h"
#include "ballast/checkpoint/element_type.h"
#include "ballast/checkpoint/system.h"

namespace ballast::ckpt {
namespace {

constexpr std::size_t kMostOpen = 8;

std::filesystem::path find(const CheckpointFolder& folder, const std::string& tag) {
  const std::string name = tag.empty() ? folder.latest() : tag;
  if (!is_plain_name(name))
    throw IoError("checkpoint.load", "not a tag (", name, "; the name of a folder in ", folder.path().string(), ")");
  const std::filesystem::path path = folder.of(name);
  std::error_code ignored;
  if (!std::filesystem::exists(path / Manifest::kFile, ignored)) {
    std::string known;
    for (const std::string& other : folder.tags()) known.append(known.empty() ? "" : ", ").append(other);
    throw IoError("checkpoint.load", "there is no such checkpoint (", (path / Manifest::kFile).string(),
                  " is missing; there are: ", known.empty() ? "none" : known, ")");
  }
  return path;
}

}  // namespace

CheckpointReader::CheckpointReader(const CheckpointFolder& folder, const std::string& tag, Owner owner)
    : path_(find(folder, tag)), owner_(owner) {
  const std::filesystem::path file = path_ / Manifest::kFile;
  const std::string text = read_text(file, Manifest::kMostBytes, owner);
  manifest_ = Manifest::from_text(text, file.string());
  digest_ = checksum_text(ballast::checksum(std::as_bytes(std::span(text))));
  for (const FileRecord& record : manifest_.files) files_[record.name] = &record;
  const auto note = [this](const Piece& piece) { checksums_[piece.file][piece.tensor] = piece.checksum; };
  for (const ParameterRecord& parameter : manifest_.parameters)
    for (const auto& [key, pieces] : parameter.states) std::for_each(pieces.begin(), pieces.end(), note);
  for (const BufferRecord& buffer : manifest_.buffers) std::for_each(buffer.pieces.begin(), buffer.pieces.end(), note);
  for (const auto& generators : manifest_.rng)
    for (const auto& [name, piece] : generators) note(piece);
}

std::shared_ptr<SafetensorsReader> CheckpointReader::open(const std::string& name) {
  const auto found = std::find_if(open_.begin(), open_.end(), [&](const auto& entry) { return entry.first == name; });
  if (found != open_.end()) {
    open_.splice(open_.begin(), open_, found);
    return open_.front().second;
  }
  auto reader = std::make_shared<SafetensorsReader>(path_ / name, owner_);
  const FileRecord& record = *files_.at(name);
  check_eq<IoError>("checkpoint.read", "the file has another length than was written", reader->bytes(), record.bytes,
                    "bytes; ", reader->path().string(), rank_text(owner_), "; load another checkpoint");
  std::vector<std::uint64_t> sums;
  for (const TensorInfo& tensor : reader->header().tensors) {
    const auto& known = checksums_[name];
    const auto sum = known.find(tensor.name);
    sums.push_back(sum == known.end() ? 0 : sum->second);
  }
  if (reader->checksum(sums) != record.checksum)
    throw IoError("checkpoint.read", "the file's header is not what was written (", reader->path().string(),
                  rank_text(owner_), "; load another checkpoint)");
  if (open_.size() == kMostOpen) open_.pop_back();
  open_.emplace_front(name, std::move(reader));
  return open_.front().second;
}

// No more files at once than are held open.
void CheckpointReader::add(TensorRead read) {
  if (!files_later_.contains(read.file.get()) && files_later_.size() == kMostOpen) complete();
  files_later_.insert(read.file.get());
  later_.push_back(std::move(read));
}

void CheckpointReader::complete() {
  files_later_.clear();
  read_tensors(std::exchange(later_, {}), owner_);
}

void CheckpointReader::read_later(const Pieces& pieces, c10::ScalarType dtype, std::int64_t begin, std::int64_t end,
                                  std::span<std::byte> to) {
  const auto element = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (const Piece& piece : pieces) {
    if (piece.end <= begin || piece.begin >= end) continue;
    std::shared_ptr<SafetensorsReader> file = open(piece.file);
    const TensorInfo& tensor = file->find(piece.tensor);
    if (tensor.dtype != dtype || tensor.numel != piece.end - piece.begin)
      throw IoError("checkpoint.read", "file and manifest disagree about a tensor (", file->path().string(), ", ",
                    piece.tensor, "; ", tensor.numel, " of ", name_of(tensor.dtype), ", want ", piece.end - piece.begin,
                    " of ", name_of(dtype), rank_text(owner_), ")");
    const std::int64_t first = std::max(begin, piece.begin), last = std::min(end, piece.end);
    add({std::move(file), &tensor, piece.checksum, (first - piece.begin) * element, (last - piece.begin) * element,
         to.data() + (first - begin) * element});
  }
}

void CheckpointReader::read(const Pieces& pieces, c10::ScalarType dtype, std::int64_t begin, std::int64_t end,
                            std::span<std::byte> to) {
  read_later(pieces, dtype, begin, end, to);
  complete();
}

void CheckpointReader::verify(const FileRecord& record) {
  const std::shared_ptr<SafetensorsReader> file = open(record.name);
  for (const TensorInfo& tensor : file->header().tensors)
    add({file, &tensor, checksums_.at(record.name).at(tensor.name)});
  complete();
}

}  // namespace ballast::ckpt
