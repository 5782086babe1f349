#include "ballast/checkpoint/element_type.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "ballast/base/error.h"

namespace ballast::ckpt {
namespace {

constexpr std::pair<const char*, c10::ScalarType> kTypes[] = {
    {"BOOL", c10::kBool},
    {"U8", c10::kByte},
    {"I8", c10::kChar},
    {"F8_E5M2", c10::kFloat8_e5m2},
    {"F8_E4M3", c10::kFloat8_e4m3fn},
    {"I16", c10::kShort},
    {"U16", c10::kUInt16},
    {"F16", c10::kHalf},
    {"BF16", c10::kBFloat16},
    {"I32", c10::kInt},
    {"U32", c10::kUInt32},
    {"F32", c10::kFloat},
    {"F64", c10::kDouble},
    {"I64", c10::kLong},
    {"U64", c10::kUInt64},
};

}  // namespace

std::optional<c10::ScalarType> element_type(const std::string& name) {
  for (const auto& [known, type] : kTypes)
    if (name == known) return type;
  return std::nullopt;
}

bool can_hold(c10::ScalarType type) {
  return std::any_of(std::begin(kTypes), std::end(kTypes), [type](const auto& known) { return known.second == type; });
}

const char* name_of(c10::ScalarType type) {
  for (const auto& [name, known] : kTypes)
    if (type == known) return name;
  throw UseError("checkpoint.save", "files can't hold this element type (", c10::toString(type), ")");
}

}  // namespace ballast::ckpt
