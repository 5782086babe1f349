#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

namespace ballast::ckpt {

/// Element types by the names of the safetensors format ("F32", "BF16"); nothing for one that it, or LibTorch, doesn't
/// have.
std::optional<c10::ScalarType> element_type(const std::string& name);
/// Has the format this type? Complex and quantized ones it hasn't.
bool can_hold(c10::ScalarType type);
/// UseError for a type that the format doesn't have.
const char* name_of(c10::ScalarType type);

}  // namespace ballast::ckpt
