#include "ballast/engine/save_plan.h"

#include <algorithm>
#include <set>

#include "ballast/base/error.h"
#include "ballast/checkpoint/checkpoint_folder.h"
#include "ballast/checkpoint/element_type.h"

namespace ballast {
namespace {

// Of one tensor in a file: a rank that reads a part of it has to read all of it, for its checksum. And of what a save
// holds of states on disk; their chunks have as many elements unless sub_group_size says otherwise.
constexpr std::int64_t kMostElements = std::int64_t{4} << 20;

std::string buffer_name(const std::string& name) { return "buffer/" + name; }
std::string generator_name(const std::string& name) { return "rng/" + name; }

}  // namespace

SavePlan::SavePlan(const Layout& layout, SavedKeys keys, std::vector<bool> active, NamedTensors buffers,
                   NamedTensors generators)
    : layout_(layout),
      keys_(std::move(keys)),
      active_(std::move(active)),
      buffers_(std::move(buffers)),
      generators_(std::move(generators)) {}

std::vector<SavedPart> SavePlan::parts(const Unit& unit, int rank) const {
  std::vector<SavedPart> parts;
  const Range shard = unit.shard_of(rank);
  const std::vector<std::string>& keys = keys_.of(unit);
  for (std::int64_t begin = shard.begin; begin < shard.end; begin += kMostElements) {
    SavedPart& part = parts.emplace_back(SavedPart{{begin, std::min(begin + kMostElements, shard.end)}, {}});
    for (std::size_t key = 0; key < keys.size(); ++key)
      for (const Slot& slot : unit.slots) {
        if (keys[key] == kGradientKey && !active_[static_cast<std::size_t>(slot.parameter)]) continue;
        const Range flat = intersect(part.flat, {slot.offset, slot.offset + slot.numel});
        if (flat.empty()) continue;
        const Range elements{flat.begin - slot.offset, flat.end - slot.offset};
        std::string name = keys[key] + "/" + layout_.parameters[static_cast<std::size_t>(slot.parameter)].name();
        if (elements.begin > 0) name += "@" + std::to_string(elements.begin);
        part.pieces.push_back({slot.parameter, key, elements, flat, std::move(name)});
      }
  }
  return parts;
}

std::vector<ckpt::TensorSpec> SavePlan::tensors(int rank) const {
  std::vector<ckpt::TensorSpec> tensors;
  for (const Unit& unit : layout_.units)
    for (const SavedPart& part : parts(unit, rank))
      for (const SavedPiece& piece : part.pieces)
        tensors.push_back({piece.name, unit.trainable ? c10::kFloat : unit.compute_dtype, {piece.elements.size()}});
  if (rank == 0)
    for (const auto& [name, value] : buffers_)
      tensors.push_back({buffer_name(name), value.scalar_type(), value.sizes().vec()});
  for (const auto& [name, value] : generators_)
    tensors.push_back({generator_name(name), value.scalar_type(), value.sizes().vec()});
  std::set<std::string> names;
  for (const ckpt::TensorSpec& tensor : tensors) {
    if (!ckpt::can_hold(tensor.dtype))
      throw UseError("engine.save_checkpoint", "files can't hold a tensor of this element type (", tensor.name, ", ",
                     c10::toString(tensor.dtype),
                     "; keep it as another, complex numbers by at::view_as_real(), or leave it out with "
                     "EngineOptions::buffers)");
    if (!names.insert(tensor.name).second)
      throw UseError("engine.save_checkpoint", "two tensors of a file would have one name (", tensor.name,
                     "; rename a parameter)");
  }
  return tensors;
}

void SavePlan::describe(ckpt::Manifest& manifest) const {
  const std::size_t first = manifest.parameters.size();
  for (const ParameterInfo& info : layout_.parameters) {
    ckpt::ParameterRecord record;
    record.names = info.names;
    record.shape = info.shape;
    record.numel = info.numel;
    record.dtype = info.compute_dtype;
    record.trainable = info.trainable;
    manifest.parameters.push_back(std::move(record));
  }
  for (const Unit& unit : layout_.units) {
    const std::vector<std::string>& keys = keys_.of(unit);
    for (const Slot& slot : unit.slots)
      for (const std::string& key : keys)
        if (key != kGradientKey || active_[static_cast<std::size_t>(slot.parameter)])
          manifest.parameters[first + static_cast<std::size_t>(slot.parameter)].states[key] = {};
    for (int rank = 0; rank < layout_.world; ++rank)
      for (const SavedPart& part : parts(unit, rank))
        for (const SavedPiece& piece : part.pieces)
          manifest.parameters[first + static_cast<std::size_t>(piece.parameter)].states[keys[piece.key]].push_back(
              {ckpt::rank_file_name(rank, layout_.world), piece.name, piece.elements.begin, piece.elements.end, 0});
  }
  for (const auto& [name, value] : buffers_) {
    ckpt::BufferRecord record{name, value.sizes().vec(), value.numel(), value.scalar_type(), {}};
    record.pieces.push_back({ckpt::rank_file_name(0, layout_.world), buffer_name(name), 0, value.numel(), 0});
    manifest.buffers.push_back(std::move(record));
  }
  for (int rank = 0; rank < layout_.world; ++rank) {
    auto& of_rank = manifest.rng.emplace_back();
    for (const auto& [name, value] : generators_)
      of_rank[name] = {ckpt::rank_file_name(rank, layout_.world), generator_name(name), 0, value.numel(), 0};
  }
}

}  // namespace ballast
