#include "ballast/checkpoint/tensor_reads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "ballast/base/math.h"
#include "tests/checkpoint/support.h"

namespace ballast::ckpt {
namespace {

/// Bytes of tensors that begin and end anywhere in pages, blocks and extents, some of them empty.
const std::vector<std::int64_t> kSizes{0, 1, 4095, 3, 5 << 20, 0, 7, (33 << 20) + 5, 1 << 20, 12345, 30 << 20, 0};

class TensorReads : public testing::Test {
 protected:
  TensorReads() {
    std::vector<TensorSpec> specs;
    for (std::size_t i = 0; i < kSizes.size(); ++i) specs.push_back({"t" + std::to_string(i), c10::kByte, {kSizes[i]}});
    SafetensorsWriter writer(path_, specs, {}, {});
    for (std::size_t i = 0; i < kSizes.size(); ++i) writer.append(data_of(i));
    sums_ = writer.finish().tensors;
  }
  static std::vector<std::byte> data_of(std::size_t i) {
    return some_bytes(static_cast<std::size_t>(kSizes[i]), static_cast<int>(i));
  }
  /// All but `margin` bytes at each end of each, into `kept`.
  std::vector<TensorRead> reads(std::int64_t margin) {
    const auto file = std::make_shared<SafetensorsReader>(path_, Owner{3});
    kept_.assign(kSizes.size(), {});
    std::vector<TensorRead> reads;
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      TensorRead read{file, &file->find("t" + std::to_string(i)), sums_[i]};
      read.begin = std::min(margin, kSizes[i]);
      read.end = std::max(read.begin, kSizes[i] - margin);
      kept_[i].resize(static_cast<std::size_t>(read.end - read.begin));
      read.to = kept_[i].data();
      reads.push_back(read);
    }
    return reads;
  }
  void flip(std::int64_t byte) {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(byte);
    const auto was = static_cast<char>(file.get());
    file.seekp(byte);
    file.put(static_cast<char>(was ^ 4));
  }

  const TestFolder folder_;
  const std::filesystem::path path_ = folder_ / "a.safetensors";
  std::vector<std::uint64_t> sums_;
  std::vector<std::vector<std::byte>> kept_;
};

TEST_F(TensorReads, KeepAnyPartOfAnyTensor) {
  for (const std::int64_t margin : {0, 1, 5000}) {
    auto all = reads(margin);
    if (margin == 1) std::reverse(all.begin(), all.end());  // in no order that a file has
    read_tensors(all, {3});
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      const std::vector<std::byte> whole = data_of(i);
      const auto begin = whole.begin() + std::min<std::int64_t>(margin, kSizes[i]);
      EXPECT_TRUE(std::equal(kept_[i].begin(), kept_[i].end(), begin)) << i << ", margin " << margin;
    }
  }
}

// Parts whose place in memory is to pages as it is to those of the file are read straight there, others aren't.
TEST_F(TensorReads, KeepSeveralPartsOfATensorInAnyPlace) {
  constexpr std::int64_t kPage = 4096;
  const auto all = reads(0);
  for (const std::int64_t shift : {0, 1}) {
    std::vector<TensorRead> parts;
    std::vector<std::size_t> of;
    for (const std::size_t i : {10, 4, 7})
      for (const auto& [begin, end] : {std::pair{0.3, 0.9}, {0.0, 0.3}, {0.95, 1.0}, {0.2, 0.4}, {0.5, 0.5}}) {
        TensorRead part = all[i];
        part.begin = static_cast<std::int64_t>(begin * static_cast<double>(kSizes[i]));
        part.end = static_cast<std::int64_t>(end * static_cast<double>(kSizes[i]));
        parts.push_back(part);
        of.push_back(i);
      }
    std::vector<std::vector<std::byte>> memory;
    for (TensorRead& part : parts) {
      memory.emplace_back(static_cast<std::size_t>(part.end - part.begin + 3 * kPage), std::byte{0xa5});
      const auto address = reinterpret_cast<std::uintptr_t>(memory.back().data());
      const std::int64_t page =
          round_up(static_cast<std::int64_t>(address), kPage) - static_cast<std::int64_t>(address);
      part.to = memory.back().data() + page + (part.file->place(*part.tensor) + part.begin + shift) % kPage;
    }
    read_tensors(parts, {3});
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const std::vector<std::byte> whole = data_of(of[p]);
      const std::int64_t size = parts[p].end - parts[p].begin;
      EXPECT_TRUE(std::equal(parts[p].to, parts[p].to + size, whole.begin() + parts[p].begin)) << p << ", " << shift;
      const auto untouched = [](std::byte byte) { return byte == std::byte{0xa5}; };
      EXPECT_TRUE(std::all_of(memory[p].data(), parts[p].to, untouched)) << p << ", " << shift;
      EXPECT_TRUE(std::all_of(parts[p].to + size, memory[p].data() + memory[p].size(), untouched))
          << p << ", " << shift;
    }
  }
}

TEST_F(TensorReads, TheFirstInOrderThatIsDamagedIsTheOneThatIsNamed) {
  auto all = reads(0);
  const auto& file = *all.front().file;
  for (const char* name : {"t10", "t7", "t8"}) flip(file.place(file.find(name)) + 100);
  for (int turn = 0; turn < 5; ++turn) {
    const std::string error = error_of([&] { read_tensors(all, {3}); });
    EXPECT_NE(error.find(path_.string() + ", tensor t7; checksum got "), std::string::npos) << error;
    EXPECT_NE(error.find("rank 3"), std::string::npos) << error;
  }
  std::filesystem::resize_file(path_, 40 << 20);  // cut while it is open
  const std::string cut = error_of([&] { read_tensors({all[10]}, {3}); });
  EXPECT_NE(cut.find("the file ends too early"), std::string::npos) << cut;
}

}  // namespace
}  // namespace ballast::ckpt
