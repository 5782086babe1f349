#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "ballast/base/error.h"
#include "ballast/checkpoint/bounded_json.h"
#include "ballast/checkpoint/element_type.h"
#include "ballast/checkpoint/safetensors.h"

namespace ballast::ckpt {
namespace {

using Json = nlohmann::json;

std::string quoted(const std::string& name) { return Json(name).dump(-1, ' ', true, Json::error_handler_t::replace); }

/// Reads one tensor's entry; every complaint names the file and the tensor.
class Entry {
 public:
  Entry(const std::string& file, const std::string& name, const Json& json) : file_(file), name_(name), json_(json) {}

  TensorInfo read() const {
    if (!json_.is_object() || json_.size() != 3 || !json_.contains("dtype") || !json_.contains("shape") ||
        !json_.contains("data_offsets"))
      fail("a tensor needs dtype, shape and data_offsets, and nothing else");
    TensorInfo info;
    info.name = name_;
    const Json& dtype = json_["dtype"];
    const auto type = dtype.is_string() ? element_type(dtype.get_ref<const std::string&>()) : std::nullopt;
    if (!type) fail("unknown dtype " + dtype.dump(-1, ' ', true, Json::error_handler_t::replace));
    info.dtype = *type;
    info.shape = numbers("shape");
    info.numel = 1;
    const bool empty = std::find(info.shape.begin(), info.shape.end(), 0) != info.shape.end();
    for (const std::int64_t size : info.shape)
      if (!empty && __builtin_mul_overflow(info.numel, size, &info.numel)) fail("the shape has too many elements");
    if (empty) info.numel = 0;
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(info.numel, static_cast<std::int64_t>(c10::elementSize(info.dtype)), &bytes))
      fail("the shape has too many bytes");
    const std::vector<std::int64_t> offsets = numbers("data_offsets");
    if (offsets.size() != 2 || offsets[0] > offsets[1]) fail("data_offsets are no range");
    info.begin = offsets[0];
    info.end = offsets[1];
    if (info.end - info.begin != bytes)
      fail("shape and dtype want " + std::to_string(bytes) + " bytes, data_offsets hold " +
           std::to_string(info.end - info.begin));
    return info;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw IoError("checkpoint.read", "a bad header: ", what, " (", file_, "; tensor ", quoted(name_), ")");
  }
  std::vector<std::int64_t> numbers(const char* key) const {
    const Json& list = json_[key];
    if (!list.is_array()) fail(std::string(key) + " is no array");
    std::vector<std::int64_t> values;
    for (const Json& value : list) {
      if (!value.is_number_unsigned() ||
          value.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        fail(std::string(key) + " holds no whole number >= 0 of 63 bits");
      values.push_back(value.get<std::int64_t>());
    }
    return values;
  }

  const std::string& file_;
  const std::string& name_;
  const Json& json_;
};

}  // namespace

SafetensorsHeader parse_header(std::string_view json, std::int64_t data_bytes, const std::string& file) {
  const Json root = parse_bounded(json, 3, file);
  if (!root.is_object()) throw IoError("checkpoint.read", "a bad header: no JSON object (", file, ")");
  SafetensorsHeader header;
  for (const auto& [name, value] : root.items()) {
    if (name != "__metadata__") {
      header.tensors.push_back(Entry(file, name, value).read());
      continue;
    }
    if (!value.is_object()) throw IoError("checkpoint.read", "a bad header: __metadata__ is no object (", file, ")");
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string())
        throw IoError("checkpoint.read", "a bad header: __metadata__ holds more than texts (", file, "; ", quoted(key),
                      ")");
      header.metadata[key] = text.get<std::string>();
    }
  }
  std::sort(header.tensors.begin(), header.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::int64_t end = 0;
  for (const TensorInfo& tensor : header.tensors) {
    if (tensor.begin != end)
      throw IoError("checkpoint.read", "a bad header: tensors overlap or leave a gap (", file, "; tensor ",
                    quoted(tensor.name), " begins at byte ", tensor.begin, ", the one before ends at ", end, ")");
    end = tensor.end;
  }
  if (end != data_bytes)
    throw IoError("checkpoint.read", "the header doesn't fit the file (", file, "; its tensors hold ", end,
                  " bytes, behind it are ", data_bytes, "; the file was cut, or its header is wrong)");
  return header;
}

}  // namespace ballast::ckpt
