// Inputs for take(), by one of two drivers: with BALLAST_LIBFUZZER (clang, -fsanitize=fuzzer) libFuzzer's; else main()
// below, which mutates the corpus for a fixed number of inputs, as the tests run it.
#include "tests/checkpoint/fuzz_driver.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "ballast/base/remove_tree.h"

namespace ballast::fuzz {

void give_up(const std::string& what) {
  std::fprintf(stderr, "fuzz: %s\n", what.c_str());
  std::abort();
}

const std::filesystem::path& scratch() {
  static const std::filesystem::path folder = [] {
    const auto base =
        ::access("/dev/shm", W_OK) == 0 ? std::filesystem::path("/dev/shm") : std::filesystem::temp_directory_path();
    const auto made = base / ("ballast-fuzz-" + std::to_string(::getpid()));
    std::filesystem::create_directories(made);
    return made;
  }();
  return folder;
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

bool refused_by_name(const std::string& message, const std::string& name) {
  if (message.find(name) == std::string::npos) give_up("an error without a file: " + message);
  return false;
}

}  // namespace ballast::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  ballast::fuzz::take({reinterpret_cast<const char*>(data), size});
  return 0;
}

#ifndef BALLAST_LIBFUZZER
namespace {

using namespace ballast::fuzz;
namespace fs = std::filesystem;

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
  long good = 0;
  for (const std::string& input : corpus) good += take(input) ? 1 : 0;
  if (good == 0) give_up("the corpus holds nothing that a reader takes: nobody gets far with it");
  Mutator mutator(corpus, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
  const long inputs = std::strtol(argv[2], nullptr, 10);
  for (long i = 0; i < inputs; ++i) {
    const std::string input = mutator.next();
    write(scratch() / "input", input);  // stays where the process dies
    good += take(input) ? 1 : 0;
  }
  std::printf("%ld inputs from %zu files, %ld taken for good\n", inputs, corpus.size(), good);
  ballast::remove_tree(scratch());
  return 0;
}
#endif
