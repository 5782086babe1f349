// Strange files against the readers of checkpoints. An input is the kind of reader (its first byte: a safetensors file,
// a manifest, a rank's record) and the text.
#include <vector>

#include "ballast/base/checksum.h"
#include "ballast/base/error.h"
#include "ballast/checkpoint/checkpoint_folder.h"
#include "ballast/checkpoint/safetensors.h"
#include "tests/checkpoint/fuzz_driver.h"

namespace ballast::fuzz {
namespace {

using namespace ckpt;
namespace fs = std::filesystem;

constexpr const char* kName = "strange";

void read_safetensors(const std::string& text) {
  const fs::path path = scratch() / kName;
  write(path, text);
  SafetensorsReader reader(path, {});
  std::int64_t bytes = 0;
  std::vector<std::byte> data;
  for (const TensorInfo& tensor : reader.header().tensors) {
    data.resize(static_cast<std::size_t>(tensor.end - tensor.begin));  // what a caller takes: never more than the file
    bytes += tensor.end - tensor.begin;
    if (bytes > static_cast<std::int64_t>(text.size())) give_up("tensors with more bytes than the file");
    reader.read(tensor, 0, data);
    if (&reader.find(tensor.name) != &tensor) give_up("a tensor that isn't found by its name");
  }
}

// A stranger's manifest has a checksum that fits; without it nothing behind would ever be reached.
std::string with_checksum(std::string text) {
  const std::string key = "\"checksum\": \"", zeros(16, '0');
  const std::size_t at = text.find(key);
  if (at == std::string::npos || text.size() < at + key.size() + zeros.size()) return text;
  text.replace(at + key.size(), zeros.size(), zeros);
  const std::uint64_t sum = checksum(std::as_bytes(std::span(text)));
  return text.replace(at + key.size(), zeros.size(), checksum_text(sum));
}

void read_manifest(const std::string& text) {
  const Manifest manifest = Manifest::from_text(with_checksum(text), kName);
  const auto check = [](const Pieces& pieces, std::int64_t numel) {
    std::int64_t end = 0;
    for (const Piece& piece : pieces) {
      if (piece.begin != end || piece.end < end || !is_plain_name(piece.file)) give_up("a bad piece was let through");
      end = piece.end;
    }
    if (end != numel) give_up("pieces that don't make up their tensor were let through");
  };
  for (const ParameterRecord& parameter : manifest.parameters)
    for (const auto& [key, pieces] : parameter.states) check(pieces, parameter.numel);
  for (const BufferRecord& buffer : manifest.buffers) check(buffer.pieces, buffer.numel);
  if (Manifest::from_text(manifest.to_text(), kName).to_text() != manifest.to_text())
    give_up("a manifest that doesn't come back from its text");
}

}  // namespace

bool take(const std::string& input) {
  if (input.empty()) return false;
  const std::string text = input.substr(1);
  try {
    if (input[0] == 's')
      read_safetensors(text);
    else if (input[0] == 'm')
      read_manifest(text);
    else
      Part::from_text(text, kName);
    return true;
  } catch (const IoError& e) {
    return refused_by_name(e.what(), kName);
  }
}

}  // namespace ballast::fuzz
