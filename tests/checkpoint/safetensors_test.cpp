#include "ballast/checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <fstream>

#include "ballast/checkpoint/element_type.h"
#include "ballast/checkpoint/system.h"
#include "tests/checkpoint/support.h"

namespace ballast::ckpt {
namespace {

// As another program would write it: no padding.
std::string file_text(const std::string& json, std::size_t data_bytes, std::uint64_t length = ~std::uint64_t{0}) {
  if (length == ~std::uint64_t{0}) length = json.size();
  std::string text;
  for (int i = 0; i < 8; ++i) text.push_back(static_cast<char>(length >> (8 * i)));
  return text + json + std::string(data_bytes, '\1');
}

std::string error_of_file(const std::string& content) {
  const TestFolder folder;
  std::ofstream(folder / "x.safetensors", std::ios::binary) << content;
  const std::string error = error_of([&] { SafetensorsReader(folder / "x.safetensors", {}); });
  if (!error.empty()) {
    EXPECT_NE(error.find("x.safetensors"), std::string::npos) << error;
  }
  return error;
}

TEST(Safetensors, KeepsEveryTypeAndShape) {
  const TestFolder folder;
  std::vector<TensorSpec> tensors;
  for (const char* type : {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32",
                           "F64", "I64", "U64"})
    tensors.push_back({std::string("of ") + type, element_type(type).value(), {3, 5}});
  tensors.push_back({"scalar", c10::kFloat, {}});
  tensors.push_back({"empty", c10::kFloat, {0, 4}});
  tensors.push_back({"\"quoted\"/../ä", c10::kByte, {7}});
  tensors.push_back({"large", c10::kHalf, {kBlock + 3}});
  std::size_t bytes = 0;
  for (const TensorSpec& tensor : tensors) {
    std::size_t size = c10::elementSize(tensor.dtype);
    for (const std::int64_t n : tensor.shape) size *= static_cast<std::size_t>(n);
    bytes += size;
  }
  const auto data = some_bytes(bytes);
  SafetensorsWriter writer(folder / "x", tensors, {{"format", "pt"}}, {0});
  for (std::size_t at = 0; at < bytes; at += 100'001)
    writer.append(std::span(data).subspan(at, std::min<std::size_t>(100'001, bytes - at)));
  const auto digest = writer.finish();

  SafetensorsReader reader(folder / "x", {0});
  EXPECT_EQ(reader.bytes(), digest.bytes);
  EXPECT_EQ((digest.bytes - static_cast<std::int64_t>(bytes)) % 4096, 0);
  EXPECT_EQ(reader.header().metadata, (Metadata{{"format", "pt"}}));
  EXPECT_EQ(reader.header().tensors.size(), tensors.size());
  EXPECT_EQ(reader.checksum(digest.tensors), digest.checksum);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorInfo& found = reader.find(tensors[i].name);
    EXPECT_EQ(found.dtype, tensors[i].dtype);
    EXPECT_EQ(found.shape, tensors[i].shape);
    std::vector<std::byte> read(static_cast<std::size_t>(found.end - found.begin));
    reader.read(found, 0, read);
    EXPECT_TRUE(std::equal(read.begin(), read.end(), data.begin() + found.begin)) << found.name;
    EXPECT_EQ(checksum(read), digest.tensors[i]) << found.name;
  }
  const TensorInfo& large = reader.find("large");
  std::vector<std::byte> slice(2000);
  reader.read(large, kBlock / 2 - 500, slice);
  EXPECT_TRUE(std::equal(slice.begin(), slice.end(), data.begin() + large.begin + kBlock - 1000));
  EXPECT_NE(error_of([&] { reader.read(large, kBlock, slice); }), "");
  EXPECT_NE(error_of([&] { reader.find("absent"); }), "");
}

TEST(Safetensors, ChecksumCoversEveryByte) {
  const TestFolder folder;
  SafetensorsWriter writer(folder / "x", {{"a", c10::kByte, {3}}, {"b", c10::kByte, {0}}}, {}, {0});
  writer.append(some_bytes(3));
  const auto digest = writer.finish();
  EXPECT_EQ(digest.tensors.size(), 2U);
  SafetensorsReader reader(folder / "x", {});
  auto others = digest.tensors;
  others[1] ^= 1;
  EXPECT_NE(reader.checksum(others), digest.checksum);
}

TEST(Safetensors, WriterRefusesTooLittleAndTooMuch) {
  const TestFolder folder;
  SafetensorsWriter writer(folder / "x", {{"a", c10::kFloat, {2}}}, {}, {0});
  writer.append(some_bytes(7));
  EXPECT_NE(error_of([&] { writer.finish(); }), "");
  EXPECT_NE(error_of([&] { writer.append(some_bytes(2)); }), "");
  EXPECT_NE(error_of([&] { SafetensorsWriter(folder / "y", {{"\xff", c10::kFloat, {2}}}, {}, {0}); }), "");
  EXPECT_NE(error_of([&] { SafetensorsWriter(folder / "y", {{"c", c10::kComplexFloat, {2}}}, {}, {0}); }), "");
}

TEST(Safetensors, ReadsWhatOtherProgramsWrite) {
  EXPECT_EQ(error_of_file(file_text(R"({"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},)"
                                    R"("a":{"dtype":"I32","shape":[],"data_offsets":[0,4]}})",
                                    8)),
            "");
  EXPECT_EQ(error_of_file(file_text("{}", 0)), "");
  EXPECT_EQ(error_of_file(file_text("{}        ", 0)), "");
}

struct Bad {
  const char* what;
  std::string content;
  const char* part;  // of the error
};

TEST(Safetensors, RefusesBadFiles) {
  const auto one = [](const std::string& entry, std::size_t bytes = 8) {
    return file_text("{\"a\":" + entry + "}", bytes);
  };
  const std::vector<Bad> all{
      {"empty", "", "ends too early"},
      {"shorter than its length", "1234567", "ends too early"},
      {"a header longer than the file", file_text("{}", 0, 3), "longer than the file"},
      {"a huge header", file_text("{}", 0, ~std::uint64_t{0} - 1), "longer than the file"},
      {"a length that wraps", file_text("{}", 0, std::uint64_t{1} << 63), "longer than the file"},
      {"no JSON", file_text("nonsense", 0), "not valid JSON"},
      {"no UTF-8", file_text("{\"\xff\xfe\":1}", 0), "not valid JSON"},
      {"an array", file_text("[]", 0), "no JSON object"},
      {"deep JSON", file_text(std::string(100'000, '['), 0), "nested too deeply"},
      {"a name twice",
       file_text(
           R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
           0),
       "stands twice"},
      {"no object", one("5"), "needs dtype"},
      {"no shape", one(R"({"dtype":"F32","data_offsets":[0,8]})"), "needs dtype"},
      {"more keys", one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1})"), "nothing else"},
      {"an unknown dtype", one(R"({"dtype":"F33","shape":[2],"data_offsets":[0,8]})"), "unknown dtype"},
      {"a dtype of another kind", one(R"({"dtype":[1],"shape":[2],"data_offsets":[0,8]})"), "unknown dtype"},
      {"a negative size", one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"), "no whole number"},
      {"a broken size", one(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})"), "no whole number"},
      {"a size beyond 63 bits", one(R"({"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,8]})"),
       "no whole number"},
      {"elements that overflow", one(R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,8]})"),
       "too many elements"},
      {"elements that overflow to the right number",
       one(R"({"dtype":"U8","shape":[8,2305843009213693953],"data_offsets":[0,8]})"), "too many elements"},
      {"bytes that overflow", one(R"({"dtype":"F64","shape":[2305843009213693953],"data_offsets":[0,8]})"),
       "too many bytes"},
      {"offsets backwards", one(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"), "no range"},
      {"three offsets", one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8,8]})"), "no range"},
      {"another length", one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})"), "want 8 bytes"},
      {"beyond the file", one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", 7), "doesn't fit the file"},
      {"bytes left over", one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", 9), "doesn't fit the file"},
      {"a gap", one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})"), "leave a gap"},
      {"an overlap",
       file_text(
           R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
           12),
       "overlap"},
      {"metadata that is no object", file_text(R"({"__metadata__":3})", 0), "__metadata__"},
      {"metadata of numbers", file_text(R"({"__metadata__":{"a":3}})", 0), "__metadata__"},
  };
  for (const Bad& bad : all) {
    const std::string error = error_of_file(bad.content);
    EXPECT_NE(error.find(bad.part), std::string::npos) << bad.what << ": " << error;
  }
}

}  // namespace
}  // namespace ballast::ckpt
