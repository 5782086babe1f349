// Strange files against the readers. One source, two drivers: with BALLAST_LIBFUZZER (clang, -fsanitize=fuzzer)
// libFuzzer drives it; else main() below mutates the corpus for a fixed number of inputs, which the tests run.
//
// An input is the kind of reader (its first byte: a safetensors file, a manifest, a rank's record) and the text. Every
// reader may only return or throw an IoError that names the file.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "ballast/base/checksum.h"
#include "ballast/base/error.h"
#include "ballast/base/remove_tree.h"
#include "ballast/checkpoint/checkpoint_folder.h"
#include "ballast/checkpoint/safetensors.h"

namespace {

using namespace ballast::ckpt;
namespace fs = std::filesystem;

constexpr const char* kName = "strange";

[[noreturn]] void give_up(const std::string& what) {
  std::fprintf(stderr, "fuzz_readers: %s\n", what.c_str());
  std::abort();
}

// Of this process.
const fs::path& scratch() {
  static const fs::path folder = [] {
    const fs::path base = ::access("/dev/shm", W_OK) == 0 ? fs::path("/dev/shm") : fs::temp_directory_path();
    const fs::path made = base / ("ballast-fuzz-" + std::to_string(::getpid()));
    fs::create_directories(made);
    return made;
  }();
  return folder;
}

void read_safetensors(const std::string& text) {
  const fs::path path = scratch() / kName;
  std::ofstream(path, std::ios::binary) << text;
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
  const std::uint64_t sum = ballast::checksum(std::as_bytes(std::span(text)));
  return text.replace(at + key.size(), zeros.size(), ballast::checksum_text(sum));
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

// Was it taken for good?
bool read_any(const std::string& input) {
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
  } catch (const ballast::IoError& e) {
    if (std::string(e.what()).find(kName) == std::string::npos)
      give_up(std::string("an error without a file: ") + e.what());
    return false;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  read_any({reinterpret_cast<const char*>(data), size});
  return 0;
}

#ifndef BALLAST_LIBFUZZER
namespace {

/// Changes that a mutation makes, some of them with what headers and manifests are made of.
class Mutator {
 public:
  Mutator(std::vector<std::string> corpus, std::uint64_t seed) : corpus_(std::move(corpus)), random_(seed) {}

  std::string next() {
    std::string text = corpus_[below(corpus_.size())];
    for (std::size_t changes = 1 + below(4); changes > 0; --changes) change(text);
    return text;
  }

 private:
  std::size_t below(std::size_t n) {
    return n == 0 ? 0 : std::uniform_int_distribution<std::size_t>(0, n - 1)(random_);
  }

  void change(std::string& text) {
    static const std::vector<std::string> kWords{"[",
                                                 "{",
                                                 "}",
                                                 "]",
                                                 "\"",
                                                 ",",
                                                 ":",
                                                 "null",
                                                 "-1",
                                                 "0",
                                                 "1e999",
                                                 "true",
                                                 "2.5",
                                                 "../x",
                                                 "a/b",
                                                 "\\u0000",
                                                 "\xff",
                                                 "9223372036854775807",
                                                 "18446744073709551615",
                                                 "4611686018427387904",
                                                 "[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
                                                 "\"shape\":[4294967296,4294967296]",
                                                 "\"data_offsets\":[0,0]",
                                                 "F64",
                                                 "BF16",
                                                 "\"__metadata__\":{\"a\":1}"};
    const std::size_t at = below(text.size() + 1), length = std::min(below(12), text.size() - at);
    switch (below(7)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(below(256));
        break;
      case 1:
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 2:
        text.erase(at, length);
        break;
      case 3:
        text.insert(at, kWords[below(kWords.size())]);
        break;
      case 4:
        text.insert(at, text.substr(below(text.size()), below(80)));  // a name twice, tensors that overlap
        break;
      case 5:
        text.replace(at, length, kWords[below(kWords.size())]);
        break;
      default: {  // a number by another
        const std::size_t digit = text.find_first_of("0123456789", at);
        if (digit == std::string::npos) break;
        const std::size_t end = std::min(text.find_first_not_of("0123456789", digit), text.size());
        text.replace(digit, end - digit, std::to_string(random_() >> below(64)));
      }
    }
  }

  const std::vector<std::string> corpus_;
  std::mt19937_64 random_;
};

}  // namespace

// usage: CORPUS INPUTS [SEED]
int main(int argc, char** argv) {
  if (argc < 3) return 2;
  std::vector<std::string> corpus;
  std::vector<fs::path> files(fs::directory_iterator(argv[1]), {});
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) {
    std::ifstream stream(file, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  if (corpus.empty()) give_up(std::string("no corpus in ") + argv[1]);
  long taken = 0;
  for (const std::string& input : corpus) taken += read_any(input) ? 1 : 0;
  if (taken == 0) give_up("the corpus holds nothing that a reader takes: nobody gets far with it");
  Mutator mutator(corpus, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
  const long inputs = std::strtol(argv[2], nullptr, 10);
  for (long i = 0; i < inputs; ++i) {
    const std::string input = mutator.next();
    std::ofstream(scratch() / "input", std::ios::binary) << input;  // stays where the process dies
    taken += read_any(input) ? 1 : 0;
  }
  std::printf("%ld inputs from %zu files, %ld taken for good\n", inputs, corpus.size(), taken);
  ballast::remove_tree(scratch());
  return 0;
}
#endif
