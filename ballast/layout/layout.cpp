#include "ballast/layout/layout.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "ballast/base/edit_distance.h"
#include "ballast/base/error.h"
#include "ballast/base/math.h"

namespace ballast {

std::optional<std::size_t> Unit::slot_at(std::int64_t element) const {
  for (std::size_t i = 0; i < slots.size(); ++i)
    if (slots[i].offset <= element && element < slots[i].offset + slots[i].numel) return i;
  return std::nullopt;
}

Range intersect(Range a, Range b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

const Slot& Layout::slot_of(int parameter) const {
  const Place& place = places[static_cast<std::size_t>(parameter)];
  return units[static_cast<std::size_t>(place.unit)].slots[static_cast<std::size_t>(place.slot)];
}

int Layout::find(const std::string& name) const {
  std::vector<std::string> known;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    for (const std::string& candidate : parameters[i].names) {
      if (candidate == name) return static_cast<int>(i);
      known.push_back(candidate);
    }
  throw UseError("layout.find", "no parameter of this name (", name, "; nearest: ", nearest(name, known), ")");
}

Layout make_layout(std::vector<ParameterInfo> parameters, int world) {
  Layout layout;
  layout.world = world;
  layout.parameters = std::move(parameters);
  layout.places.resize(layout.parameters.size());

  using Key = std::tuple<std::string, c10::ScalarType, c10::ScalarType, bool>;
  std::map<Key, int> unit_by_key;
  for (std::size_t i = 0; i < layout.parameters.size(); ++i) {
    const ParameterInfo& info = layout.parameters[i];
    const Key key{info.unit, info.dtype, info.compute_dtype, info.trainable};
    const auto [entry, fresh] = unit_by_key.try_emplace(key, static_cast<int>(layout.units.size()));
    if (fresh) {
      Unit unit;
      unit.id = entry->second;
      unit.name = info.unit.empty() ? "(root)" : info.unit;
      unit.dtype = info.dtype;
      unit.compute_dtype = info.compute_dtype;
      unit.trainable = info.trainable;
      unit.leaf = info.leaf;
      layout.units.push_back(std::move(unit));
    }
    Unit& unit = layout.units[static_cast<std::size_t>(entry->second)];
    const std::int64_t end = unit.slots.empty() ? 0 : unit.slots.back().offset + unit.slots.back().numel;
    layout.places[i] = {unit.id, static_cast<int>(unit.slots.size())};
    unit.slots.push_back({static_cast<int>(i), round_up(end, kSlotAlign), info.numel});
    unit.numel += info.numel;
  }
  for (Unit& unit : layout.units) {
    const std::int64_t end = unit.slots.back().offset + unit.slots.back().numel;
    unit.shard = round_up(ceil_div(end, world), kShardAlign);
    unit.padded = unit.shard * world;
  }
  return layout;
}

}  // namespace ballast
