#include "ballast/checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "ballast/base/error.h"
#include "ballast/base/math.h"
#include "ballast/checkpoint/element_type.h"
#include "ballast/checkpoint/system.h"

namespace ballast::ckpt {
namespace {

constexpr std::int64_t kLengthBytes = 8, kPage = 4096;

std::string length_text(std::uint64_t length) {
  std::string text(kLengthBytes, '\0');
  for (int i = 0; i < kLengthBytes; ++i) text[static_cast<std::size_t>(i)] = static_cast<char>(length >> (8 * i));
  return text;
}

std::int64_t bytes_of(const TensorSpec& tensor) {
  std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(tensor.dtype));
  for (const std::int64_t size : tensor.shape) bytes *= size;
  return bytes;
}

std::int64_t bytes_of(const std::vector<TensorSpec>& tensors) {
  std::int64_t bytes = 0;
  for (const TensorSpec& tensor : tensors) bytes += bytes_of(tensor);
  return bytes;
}

// A name that is no UTF-8 can't be written: JSON has none.
std::string header_of(const std::vector<TensorSpec>& tensors, const Metadata& metadata) {
  using Json = nlohmann::json;
  std::string text = "{";
  const auto add = [&text](const std::string& name, const Json& value) {
    try {
      text.append(text.size() > 1 ? "," : "").append(Json(name).dump()).append(":").append(value.dump());
    } catch (const Json::exception& e) {
      throw UseError("checkpoint.save", "a name is no valid UTF-8 (", e.what(), ")");
    }
  };
  if (!metadata.empty()) add("__metadata__", metadata);
  std::int64_t end = 0;
  for (const TensorSpec& tensor : tensors) {
    const std::int64_t begin = end;
    end += bytes_of(tensor);
    add(tensor.name, {{"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}});
  }
  text += "}";
  const std::int64_t padded = round_up(kLengthBytes + static_cast<std::int64_t>(text.size()), kPage) - kLengthBytes;
  text.resize(static_cast<std::size_t>(padded), ' ');
  if (padded > kMostHeaderBytes)
    throw UseError("checkpoint.save", "too many tensors for one file (", tensors.size(), "; their header has ", padded,
                   " bytes, most ", kMostHeaderBytes, ")");
  return length_text(text.size()) + text;
}

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

}  // namespace

std::uint64_t file_checksum(std::string_view header, std::span<const std::uint64_t> tensors) {
  Checksum sum;
  sum.add(std::as_bytes(std::span(header)));
  for (const std::uint64_t tensor : tensors) sum.add(bytes_of(length_text(tensor)));
  return sum.value();
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorSpec> tensors,
                                     const Metadata& metadata, Owner owner)
    : tensors_(std::move(tensors)),
      header_(header_of(tensors_, metadata)),
      file_(path, owner, static_cast<std::int64_t>(header_.size()) + bytes_of(tensors_)) {
  for (const TensorSpec& tensor : tensors_) ends_.push_back((ends_.empty() ? 0 : ends_.back()) + bytes_of(tensor));
  file_.write(bytes_of(header_));
  close_tensors();
}

// Those that end here, empty ones included.
void SafetensorsWriter::close_tensors() {
  while (checksums_.size() < ends_.size() && ends_[checksums_.size()] == written_) {
    checksums_.push_back(current_.value());
    current_ = Checksum();
  }
}

void SafetensorsWriter::append(std::span<const std::byte> data) {
  while (!data.empty()) {
    if (checksums_.size() == ends_.size())
      throw UseError("checkpoint.save", "more data than the tensors have room for (", file_.bytes(), " bytes so far)");
    const std::int64_t room = ends_[checksums_.size()] - written_;
    const auto part = data.first(std::min(data.size(), static_cast<std::size_t>(room)));
    current_.add(part);
    file_.write(part);
    written_ += static_cast<std::int64_t>(part.size());
    data = data.subspan(part.size());
    close_tensors();
  }
}

SafetensorsWriter::Digest SafetensorsWriter::finish() {
  check_eq<UseError>("checkpoint.save", "tensors without data", checksums_.size(), ends_.size(), "complete");
  file_.finish();
  return {file_.bytes(), file_checksum(header_, checksums_), checksums_};
}

SafetensorsReader::SafetensorsReader(const std::filesystem::path& path, Owner owner)
    : file_(path, owner), owner_(owner) {
  const std::string file = path.string();
  std::string length(static_cast<std::size_t>(kLengthBytes), '\0');
  file_.read(0, std::as_writable_bytes(std::span(length)));
  std::uint64_t bytes = 0;
  for (int i = kLengthBytes; i-- > 0;)
    bytes = (bytes << 8) | static_cast<unsigned char>(length[static_cast<std::size_t>(i)]);
  const auto room = static_cast<std::uint64_t>(file_.bytes() - kLengthBytes);
  if (bytes > room || bytes > static_cast<std::uint64_t>(kMostHeaderBytes))
    throw IoError("checkpoint.read", "a bad header: longer than the file, or than it may be (", file, "; got ", bytes,
                  ", file ", room, ", most ", kMostHeaderBytes, " bytes", rank_text(owner_), ")");
  text_.resize(static_cast<std::size_t>(kLengthBytes + static_cast<std::int64_t>(bytes)));
  file_.read(0, std::as_writable_bytes(std::span(text_)));
  header_ = parse_header(std::string_view(text_).substr(static_cast<std::size_t>(kLengthBytes)),
                         static_cast<std::int64_t>(room - bytes), file);
  for (std::size_t i = 0; i < header_.tensors.size(); ++i) by_name_[header_.tensors[i].name] = i;
}

const TensorInfo& SafetensorsReader::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end())
    throw IoError("checkpoint.read", "the file has no such tensor (", path().string(), "; ", name, rank_text(owner_),
                  ")");
  return header_.tensors[found->second];
}

void SafetensorsReader::read(const TensorInfo& tensor, std::int64_t first, std::span<std::byte> to) {
  const std::int64_t begin = tensor.begin + first * static_cast<std::int64_t>(c10::elementSize(tensor.dtype));
  if (first < 0 || static_cast<std::int64_t>(to.size()) > tensor.end - begin)
    throw UseError("checkpoint.read", "a tensor ends before what is read of it (", path().string(), "; ", tensor.name,
                   "; from element ", first, " on ", to.size(), " bytes, it has ", tensor.numel, " elements)");
  file_.read(static_cast<std::int64_t>(text_.size()) + begin, to);
}

std::uint64_t SafetensorsReader::checksum(std::span<const std::uint64_t> tensors) const {
  return file_checksum(text_, tensors);
}

}  // namespace ballast::ckpt
